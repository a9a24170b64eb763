"""The stages after training: consolidate, export, certify and publish."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from t5train.errors import T5TrainError
from t5train.records.stage_records import MANIFEST, Export, Weights
from t5train.release.certificate import CERTIFICATE
from tests.acceptance.io_faults.evidence import digest_of, tree
from tests.acceptance.io_faults.small_run import SmallRun
from tests.acceptance.io_faults.trial import Ending

_WEIGHTS, _EXPORT, _PUBLISHED = "weights", "export", "published/t5"


class _Stages:
    """Some of the stages after training, in order. The stages before them have run already."""

    name: str
    earlier_stages: ClassVar[tuple[str, ...]]
    """Stages that have run already."""
    stages: ClassVar[tuple[str, ...]]
    """The stages of the operation."""
    may_change: ClassVar[frozenset[str]] = frozenset({"certify.log"})
    """Existing files that the operation may change."""

    def __init__(self, small_run: SmallRun) -> None:
        self._small_run = small_run

    def prepare(self, folder: Path) -> None:
        """Copy a finished run, and run the stages before the operation."""
        self._small_run.copy_to(folder, without=("shards", "tensorboard", "step-00000002", "step-00000004"))
        self._do(folder, self.earlier_stages)

    def set_up(self, folder: Path) -> Callable[[], Any]:
        return lambda: self._do(folder, self.stages)

    def problems(self, folder: Path, ending: Ending, failed: list[str]) -> list[str]:  # noqa: ARG002 - part of Operation
        """Existing files are unchanged, and what has a manifest is whole. On success, every result is there."""
        template = folder.parent.parent / self.name
        found = [
            f"lost: {name}"
            for name, each in tree(template).items()
            if name not in self.may_change and digest_of(folder / name) != each
        ]
        for name in (_WEIGHTS, _EXPORT, _PUBLISHED):
            if (folder / name / MANIFEST).exists():
                found += _verification_problems(folder / name)
        if ending.succeeded:
            results = {"consolidate": _WEIGHTS, "export": _EXPORT, "certify": _EXPORT, "publish": _PUBLISHED}
            found += [
                f"wrong: {results[each]} is missing"
                for each in self.stages
                if not (folder / results[each] / MANIFEST).exists()
            ]
            if "certify" in self.stages and CERTIFICATE not in Export.load(folder / _EXPORT).files:
                found.append("wrong: the export is not certified")
        return found

    def _do(self, folder: Path, stages: tuple[str, ...]) -> None:
        for stage in stages:
            {"consolidate": _consolidate, "export": _export, "certify": _certify, "publish": _publish}[stage](folder)


class Consolidate(_Stages):
    """Consolidate the last checkpoint into weights."""

    name = "consolidate"
    earlier_stages = ()
    stages = ("consolidate",)


class ExportWeights(_Stages):
    """Export weights and vocabulary to a Hugging Face folder."""

    name = "export"
    earlier_stages = ("consolidate",)
    stages = ("export",)


class Certify(_Stages):
    """Prove in a fresh process that the export is the model that was trained."""

    name = "certify"
    earlier_stages = ("consolidate", "export")
    stages = ("certify",)
    may_change = frozenset({"certify.log", f"{_EXPORT}/{MANIFEST}"})


class ExportAgain(_Stages):
    """Consolidate, export and certify again when all results exist."""

    name = "export again"
    earlier_stages = ("consolidate", "export", "certify")
    stages = earlier_stages


class Publish(_Stages):
    """Publish a certified export to a local folder, and verify it there."""

    name = "publish"
    earlier_stages = ("consolidate", "export", "certify")
    stages = ("publish",)


def _consolidate(folder: Path) -> None:
    from t5train.checkpoint.consolidate import consolidate

    consolidate(SmallRun(folder).checkpoints, folder / _WEIGHTS)


def _export(folder: Path) -> None:
    from t5train.release.export import export

    run = SmallRun(folder)
    export(Weights.load(folder / _WEIGHTS), run.tokenizer, run.folder / "witness", run.spec, folder / _EXPORT)


def _certify(folder: Path) -> None:
    from t5train.release.certification import certify_in_fresh_process

    certify_in_fresh_process(Export.load(folder / _EXPORT), SmallRun(folder).folder / "witness")


def _publish(folder: Path) -> None:
    from t5train.release.publication import publish
    from t5train.release.verification import verify

    publish(Export.load(folder / _EXPORT), str(folder / _PUBLISHED))
    verify(str(folder / _PUBLISHED))


def _verification_problems(result: Path) -> list[str]:
    from t5train.release.verification import verify

    try:
        verify(result)
    except T5TrainError as error:
        return [f"wrong: {error}"]
    return []
