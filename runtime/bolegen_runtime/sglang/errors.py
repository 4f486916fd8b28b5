"""The one error of the plugin."""

from __future__ import annotations

__all__ = ["PluginError"]


class PluginError(RuntimeError):
    """What the plugin cannot serve, or cannot be installed into; names what to change."""
