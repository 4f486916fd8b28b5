"""Other verifiers: where their kernels come from, and how they are called."""

__all__: list[str] = []
