"""What takes longest to compile goes first, so that no worker is left with it at the end."""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "256 nodes" not in item.name)
