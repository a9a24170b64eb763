"""The stages gather, consolidate and publish, each in a process that is killed."""

import json
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from infra.head.storage.checkpoint_sync import keep_up
from infra.head.storage.recovery import recover
from t5train.checkpoint.consolidate import consolidate
from t5train.checkpoint.resume_point import newest_verified_tag
from t5train.errors import T5TrainError
from t5train.progress import silent
from t5train.records.stage_records import MANIFEST, Export
from t5train.release.publication import publish
from tests.acceptance.kills.independent_tags import tree, whole_tags
from tests.acceptance.kills.kill_site import Site, wrongly_chosen
from tests.acceptance.kills.kill_tally import Found, Tally
from tests.acceptance.kills.killed_process import Work, await_quiet, is_struck, seconds_of
from tests.acceptance.kills.object_folder import URL

_WHEN_MADE = ("provenance", "seal")
"""Fields of a manifest that differ each time: when it was made, and a digest over the whole manifest."""
_TIMED = 3
Content = Mapping[str, Any]


class Trial(Protocol):
    """One try of a stage, which ``work(*arguments)`` runs in its own process."""

    work: Work
    arguments: tuple[Any, ...]

    def content(self) -> Content:
        """What the stage has made so far where others would look for it, by name."""
        ...

    def after_the_kill(self, expected: Content) -> Found:
        """Return what is wrong after the kill."""
        ...

    def again(self) -> None:
        """Run the stage again, to its end."""
        ...


def kill_stage(stage: str, seed: int, kills: int, folder: Path, begin: Callable[[Path], Trial]) -> Tally:
    """Kill a stage ``kills`` times, each time in a new trial that ``begin`` makes in the folder."""
    seconds, contents_then = zip(*(_undisturbed(folder, begin) for _ in range(_TIMED)), strict=True)
    tally, expected = Tally(stage, statistics.median(seconds), seed), contents_then[0]
    assert not any(_differences(each, expected) for each in contents_then)
    while len(tally.moments) < kills:
        with _emptied(folder):
            trial, moment = begin(folder), tally.draw()
            if not is_struck(trial.work, *trial.arguments, moment=moment):
                continue
            await_quiet(folder)
            tally.note(moment, trial.after_the_kill(expected) | _again(trial, expected))
            tally.left_over += any(folder.rglob(".*.discarded"))
    print(tally.row(), flush=True)
    return tally


def _undisturbed(folder: Path, begin: Callable[[Path], Trial]) -> tuple[float, Content]:
    with _emptied(folder):
        trial = begin(folder)
        return seconds_of(trial.work, *trial.arguments), trial.content()


@contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    folder.mkdir()
    yield
    await_quiet(folder)
    shutil.rmtree(folder)


def _again(trial: Trial, expected: Content) -> Found:
    try:
        trial.again()
    except T5TrainError as error:
        return {"cannot go on": [f"{type(error).__name__}: {error}"]}
    return {"ended otherwise": _differences(trial.content(), expected)}


class Gathered:
    """The head gathers the newest checkpoints from the hosts, and older ones are pruned."""

    def __init__(self, template: Site, folder: Path) -> None:
        for name in ("hosts", "root/runs"):
            shutil.copytree(template.folder / name, folder / name, copy_function=_linked)
        self._site = template.elsewhere(folder)
        self.work, self.arguments = keep_up, (self._site.run, silent)
        self._kept = sorted(whole_tags(self._site.places))[-template.spec.storage.keep_last :]

    def content(self) -> Content:
        """All checkpoints, on head and hosts."""
        return {f"{place}/{name}": each for place in self._site.places for name, each in _seen(place).items()}

    def after_the_kill(self, expected: Content) -> Found:  # noqa: ARG002 - part of Trial
        """Checkpoints to keep are whole on some machine, and the head alone still has a whole one."""
        lost = sorted(set(self._kept) - whole_tags(self._site.places))
        lost += [] if whole_tags([self._site.checkpoints]) else ["what the head had gathered before"]
        return {"incomplete chosen": wrongly_chosen(self._site), "complete lost": lost}

    def again(self) -> None:
        """Do what the next launch and its checkpoint sync do."""
        recover(self._site.run, silent)
        if (tag := newest_verified_tag(self._site.spec.run_folder, silent)) != self._kept[-1]:
            raise T5TrainError(f"{tag} would be resumed, not {self._kept[-1]}")
        keep_up(self._site.run, silent)


class _OfTheRun:
    """A stage that reads what the run has made, and must not change it."""

    def __init__(self, site: Site, sources: Sequence[Path], before: Content) -> None:
        self._site, self._sources, self._before = site, sources, before

    def content(self) -> Content:
        """What the stage has made."""
        raise NotImplementedError

    def is_there(self) -> bool:
        """Whether its result would be taken for finished."""
        raise NotImplementedError

    def after_the_kill(self, expected: Content) -> Found:
        """A result that is there is whole, and what it was made from is unchanged."""
        half = _differences(self.content(), expected) if self.is_there() else []
        changed = _differences(contents(self._sources), self._before)
        return {"incomplete chosen": [*wrongly_chosen(self._site), *half], "complete lost": changed}


class Consolidated(_OfTheRun):
    """The head's newest checkpoint is consolidated into fp32 weights and moments."""

    def __init__(self, site: Site, before: Content, folder: Path) -> None:
        super().__init__(site, site.places, before)
        self._out = folder / "weights"
        self.work, self.arguments = _consolidate, (site.checkpoints, self._out)

    def content(self) -> Content:
        """Files and manifest."""
        return _seen(self._out)

    def is_there(self) -> bool:
        """The folder exists only when the result is finished."""
        return self._out.exists()

    def again(self) -> None:
        """Run it in this process."""
        _consolidate(*self.arguments)


class Published(_OfTheRun):
    """A certified export is published to a folder or an object store."""

    def __init__(self, site: Site, export: Export, before: Content, folder: Path, *, to_store: bool) -> None:
        super().__init__(site, [export.path], before)
        self._to_store, self._place = to_store, folder / "published" / "t5"
        self.work = publish
        self.arguments = (export, f"{URL}{self._place}" if to_store else str(self._place), silent)

    def content(self) -> Content:
        """Files and manifest."""
        return _seen(self._place)

    def is_there(self) -> bool:
        """In a store, the manifest marks a finished result; elsewhere, the folder does."""
        return (self._place / MANIFEST if self._to_store else self._place).exists()

    def again(self) -> None:
        """Run it in this process."""
        publish(*self.arguments)


def _consolidate(checkpoints: Path, out: Path) -> None:
    consolidate(checkpoints, out, moments=True)


def _linked(source: str, target: str) -> None:
    """Make a hard link. This is safe, because no stage writes into an existing file: each replaces or removes it."""
    Path(target).hardlink_to(source)


def contents(folders: Sequence[Path]) -> Content:
    """The sha256 of every file, by name."""
    return {f"{folder}/{name}": each for folder in folders for name, each in tree(folder).items()}


def _seen(folder: Path) -> Content:
    """The sha256 of every file that is not hidden or in a hidden folder; for a manifest, its content."""
    shown = {name: each for name, each in tree(folder).items() if not f"/{name}".count("/.")}
    if MANIFEST in shown:
        shown[MANIFEST] = _said((folder / MANIFEST).read_text("utf-8"))
    return shown


def _said(text: str) -> Any:
    said = json.loads(text)
    return {name: value for name, value in said.items() if name not in _WHEN_MADE}


def _differences(found: Content, expected: Content) -> list[str]:
    return [name for name in sorted(found.keys() | expected.keys()) if found.get(name) != expected.get(name)]
