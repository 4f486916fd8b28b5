"""Commands that measure the emitted modules; nothing imports them but their tests."""

__all__: list[str] = []
