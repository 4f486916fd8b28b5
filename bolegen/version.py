"""The version, said once; pyproject.toml must agree."""

__all__ = ["__version__"]

__version__ = "0.1.0"
