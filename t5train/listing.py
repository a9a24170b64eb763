"""What is in a folder. Unlike ``Path.glob``, this does not take a folder that cannot be read for an empty one."""

from pathlib import Path


def entries(folder: Path) -> list[Path]:
    """The visible entries of a folder by name; none where there is no such folder. Raises OSError."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return []
