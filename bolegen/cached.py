"""What the runtime keeps on disk: compiled modules, listed and deleted."""

from pathlib import Path

from bolegen.errors import OutputError, SpecError

__all__ = ["clear_cache", "describe_cache"]


def describe_cache(folder: Path | None) -> list[str]:
    """A line for each entry of the cache in ``folder``, by default the one that is used here.

    The runtime alone knows what a cache looks like; it loads torch, so it is imported this late.
    """
    from bolegen_runtime import list_entries

    folder = _find_folder(folder)
    entries = list_entries(folder)
    total = sum(entry.size_bytes for entry in entries)
    lines = [
        f"{entry.path.relative_to(folder)}  {entry.size_bytes:,} bytes  "
        f"{entry.request.get('template', '?')}"
        for entry in entries
    ]
    return [*lines, f"{len(entries)} modules, {total:,} bytes in {folder}"]


def clear_cache(folder: Path | None) -> str:
    """Delete every entry of the cache, and nothing else in its folder; says what it freed."""
    from bolegen_runtime import clear_entries

    folder = _find_folder(folder)
    return f"freed {clear_entries(folder):,} bytes in {folder}"


def _find_folder(folder: Path | None) -> Path:
    from bolegen_runtime import Settings

    if folder is not None:
        return folder
    try:
        found = Settings.from_env().cache_dir
    except ValueError as error:
        raise SpecError(str(error)) from error
    if found is None:
        raise OutputError(
            "there is no cache here: BOLEGEN_CACHE_DIR is off, or there is no home "
            "folder; name one with --dir"
        )
    return found
