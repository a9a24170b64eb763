"""Files of a checkpoint that no rank recorded. Standard library only, as nodes import it."""

from collections.abc import Collection, Iterable

from t5train.errors import UnlistedFile


def unlisted(found: Iterable[str], recorded: Collection[str]) -> list[str]:
    """Of the names in a tag's folder, the pickles that are not among the recorded ones."""
    return sorted(name for name in found if name.endswith(".pt") and name not in recorded)


def require_listed(where: str, found: Iterable[str], recorded: Collection[str]) -> None:
    """UnlistedFile when a tag holds a pickle that was not recorded: DeepSpeed finds files by pattern."""
    if strangers := unlisted(found, recorded):
        raise UnlistedFile(
            f"{where} holds {strangers[0]}, which no rank recorded: DeepSpeed would load it and run whatever code is "
            "in it. Move that file away, then start again; nothing was changed"
        )
