"""How files of a run over hosts get to its ranks and back: what a launch asks of storage, be it shared or not."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class RunStorage(Protocol):
    """Where the files of a run are while its ranks are at work."""

    @property
    def owner(self) -> str | None:
        """Unique id of the run that files on the hosts' own disks belong to; None where there are none."""
        ...

    def claim(self, are_ranks_at_work: bool) -> None:
        """Have the run's files on its hosts for this head alone; RunOwned if another head has them.

        Where ranks of this head are at work already, a host that does not answer for a while is no obstacle.
        """
        ...

    def require_claimed(self) -> None:
        """Raise RunOwned if another head has taken them over since."""
        ...

    def make_ready(self, attempt_folder: Path) -> Path:
        """Have what ranks begin from where they read it, and the file that tells them their job, in that folder."""
        ...

    def following(self, num_saved: Callable[[], int]) -> AbstractContextManager[None]:
        """A block in which ranks are at work; ``num_saved`` counts what hosts tell of checkpoints."""
        ...

    def take_home(self) -> None:
        """Have on the head what ranks that did their work have left."""
        ...


@dataclass(frozen=True)
class SharedStorage:
    """The root itself, which every host has."""

    write_job: Callable[[Path], Path]

    @property
    def owner(self) -> None:
        """Hosts have no files of their own."""

    def claim(self, are_ranks_at_work: bool) -> None:
        """The lock of the run's folder is enough."""

    def require_claimed(self) -> None:
        """As above."""

    def make_ready(self, attempt_folder: Path) -> Path:
        """Nothing has to move."""
        return self.write_job(attempt_folder)

    def following(self, num_saved: Callable[[], int]) -> AbstractContextManager[None]:  # noqa: ARG002 - as RunStorage has it
        """Nor while ranks are at work."""
        return nullcontext()

    def take_home(self) -> None:
        """Nor afterwards."""
