"""Numbers and sizes as text for users. Uses only the standard library, because nodes import it."""


def quantity(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless there is one: ``1 file``, ``1,200 files``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_bytes(size_bytes: int) -> str:
    """Return a size as text for users, in decimal units: ``1.3 GB`` or ``40.0 MB``."""
    return f"{size_bytes / 1e9:,.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
