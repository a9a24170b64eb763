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
from tests.acceptance.kills.independent_tags import find_complete_tags, tree
from tests.acceptance.kills.kill_site import Site, wrong_choices
from tests.acceptance.kills.kill_tally import FoundFaults, Tally
from tests.acceptance.kills.killed_process import Work, await_end_of_processes, measure_seconds, was_killed
from tests.acceptance.kills.object_folder import URL

_VOLATILE_FIELDS = ("provenance", "seal")
"""Fields of a manifest that differ each time: when it was made, and a digest over the whole manifest."""
_TIMED_RUNS = 3
Content = Mapping[str, Any]


class Trial(Protocol):
    """One try of a stage, which ``work(*arguments)`` runs in its own process."""

    work: Work
    arguments: tuple[Any, ...]

    def content(self) -> Content:
        """What the stage has made so far where others would look for it, by name."""
        ...

    def check_after_kill(self, expected: Content) -> FoundFaults:
        """Return what is wrong after the kill."""
        ...

    def repeat(self) -> None:
        """Run the stage again, to its end."""
        ...


def kill_stage(stage: str, seed: int, kills: int, folder: Path, new_trial: Callable[[Path], Trial]) -> Tally:
    """Kill a stage ``kills`` times, each time in a new trial that ``new_trial`` makes in the folder."""
    seconds, undisturbed_contents = zip(*(_run_undisturbed(folder, new_trial) for _ in range(_TIMED_RUNS)), strict=True)
    tally, expected = Tally(stage, statistics.median(seconds), seed), undisturbed_contents[0]
    assert not any(_differences(each, expected) for each in undisturbed_contents)
    while len(tally.moments) < kills:
        with _fresh_folder(folder):
            trial, moment = new_trial(folder), tally.draw()
            if not was_killed(trial.work, *trial.arguments, moment=moment):
                continue
            await_end_of_processes(folder)
            tally.record(moment, trial.check_after_kill(expected) | _repeat_and_compare(trial, expected))
            tally.partly_removed += any(folder.rglob(".*.discarded"))
    print(tally.row(), flush=True)
    return tally


def _run_undisturbed(folder: Path, new_trial: Callable[[Path], Trial]) -> tuple[float, Content]:
    with _fresh_folder(folder):
        trial = new_trial(folder)
        return measure_seconds(trial.work, *trial.arguments), trial.content()


@contextmanager
def _fresh_folder(folder: Path) -> Iterator[None]:
    folder.mkdir()
    yield
    await_end_of_processes(folder)
    shutil.rmtree(folder)


def _repeat_and_compare(trial: Trial, expected: Content) -> FoundFaults:
    try:
        trial.repeat()
    except T5TrainError as error:
        return {"cannot resume": [f"{type(error).__name__}: {error}"]}
    return {"different result": _differences(trial.content(), expected)}


class GatherTrial:
    """The head gathers the newest checkpoints from the hosts, and older ones are pruned."""

    def __init__(self, template: Site, folder: Path) -> None:
        for name in ("hosts", "root/runs"):
            shutil.copytree(template.folder / name, folder / name, copy_function=_hard_link)
        self._site = template.in_folder(folder)
        self.work, self.arguments = keep_up, (self._site.run, silent)
        self._kept = sorted(find_complete_tags(self._site.checkpoint_folders))[-template.spec.storage.keep_last :]

    def content(self) -> Content:
        """All checkpoints, on head and hosts."""
        return {
            f"{folder}/{name}": each
            for folder in self._site.checkpoint_folders
            for name, each in _visible_files(folder).items()
        }

    def check_after_kill(self, expected: Content) -> FoundFaults:  # noqa: ARG002 - part of Trial
        """Checkpoints to keep are complete on some machine, and the head alone still has a complete one."""
        lost = sorted(set(self._kept) - find_complete_tags(self._site.checkpoint_folders))
        lost += [] if find_complete_tags([self._site.checkpoints]) else ["the gathered copy"]
        return {"incomplete chosen": wrong_choices(self._site), "complete lost": lost}

    def repeat(self) -> None:
        """Do what the next launch and its checkpoint sync do."""
        recover(self._site.run, silent)
        if (tag := newest_verified_tag(self._site.spec.run_folder, silent)) != self._kept[-1]:
            raise T5TrainError(f"the run would resume from {tag} instead of {self._kept[-1]}")
        keep_up(self._site.run, silent)


class _StageOfRun:
    """A stage that reads what the run has made, and must not change it."""

    def __init__(self, site: Site, sources: Sequence[Path], before: Content) -> None:
        self._site, self._sources, self._before = site, sources, before

    def content(self) -> Content:
        raise NotImplementedError

    def looks_finished(self) -> bool:
        """Whether its result would be taken for finished."""
        raise NotImplementedError

    def check_after_kill(self, expected: Content) -> FoundFaults:
        """A result that looks finished is complete, and what it was made from is unchanged."""
        incomplete = _differences(self.content(), expected) if self.looks_finished() else []
        changed = _differences(contents(self._sources), self._before)
        return {"incomplete chosen": [*wrong_choices(self._site), *incomplete], "complete lost": changed}


class ConsolidateTrial(_StageOfRun):
    """The checkpoint to publish is consolidated into fp32 weights and moments."""

    def __init__(self, site: Site, tag: str, before: Content, folder: Path) -> None:
        super().__init__(site, site.checkpoint_folders, before)
        self._out = folder / "weights"
        self.work, self.arguments = _consolidate, (site.checkpoints, tag, self._out, site.spec.model.start_from)

    def content(self) -> Content:
        return _visible_files(self._out)

    def looks_finished(self) -> bool:
        """The folder exists only when the result is finished."""
        return self._out.exists()

    def repeat(self) -> None:
        _consolidate(*self.arguments)


class PublishTrial(_StageOfRun):
    """A certified export is published to a folder or an object store."""

    def __init__(self, site: Site, export: Export, before: Content, folder: Path, *, to_store: bool) -> None:
        super().__init__(site, [export.path], before)
        self._to_store, self._destination = to_store, folder / "published" / "t5"
        self.work = publish
        self.arguments = (export, f"{URL}{self._destination}" if to_store else str(self._destination), silent)

    def content(self) -> Content:
        return _visible_files(self._destination)

    def looks_finished(self) -> bool:
        """In a store, the manifest marks a finished result; elsewhere, the folder does."""
        return (self._destination / MANIFEST if self._to_store else self._destination).exists()

    def repeat(self) -> None:
        publish(*self.arguments)


def _consolidate(checkpoints: Path, tag: str, out: Path, start_from: str | None) -> None:
    consolidate(checkpoints, out, tag=tag, moments=True, start_from=start_from)


def _hard_link(source: str, target: str) -> None:
    """Make a hard link. This is safe, because no stage writes into an existing file: each replaces or removes it."""
    Path(target).hardlink_to(source)


def contents(folders: Sequence[Path]) -> Content:
    """The sha256 of every file, by name."""
    return {f"{folder}/{name}": each for folder in folders for name, each in tree(folder).items()}


def _visible_files(folder: Path) -> Content:
    """The sha256 of every file that is not hidden or in a hidden folder; for a manifest, its content."""
    files = {name: each for name, each in tree(folder).items() if not f"/{name}".count("/.")}
    if MANIFEST in files:
        files[MANIFEST] = _manifest_content((folder / MANIFEST).read_text("utf-8"))
    return files


def _manifest_content(text: str) -> Any:
    content = json.loads(text)
    return {name: value for name, value in content.items() if name not in _VOLATILE_FIELDS}


def _differences(found: Content, expected: Content) -> list[str]:
    return [name for name in sorted(found.keys() | expected.keys()) if found.get(name) != expected.get(name)]
