"""The stages after training: consolidate, export, certify and publish."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from t5train.errors import T5TrainError
from t5train.records.stage_records import MANIFEST, Export, Weights
from t5train.release.certificate import CERTIFICATE
from tests.acceptance.io_faults.evidence import digest_of, tree
from tests.acceptance.io_faults.small_run import SmallRun
from tests.acceptance.io_faults.trial import Ending

_WEIGHTS, _EXPORT, _PUBLISHED = "weights", "export", "published/t5"


_ALL = ("consolidate", "export", "certify", "publish")
OPERATIONS = {
    "consolidate": ((), _ALL[:1]),
    "export": (_ALL[:1], _ALL[1:2]),
    "certify": (_ALL[:2], _ALL[2:3]),
    "export again": (_ALL[:3], _ALL[:3]),
    "publish": (_ALL[:3], _ALL[3:]),
}
"""For each operation, the stages that have run already, and its own stages."""


class Release:
    """Some of the stages after training, in order. The stages before them have run already."""

    def __init__(self, name: str, small_run: SmallRun) -> None:
        self.name, self._small_run = name, small_run
        self._earlier_stages, self._stages = OPERATIONS[name]
        self._may_change = {"certify.log", *([f"{_EXPORT}/{MANIFEST}"] if name == "certify" else [])}

    def prepare(self, folder: Path) -> None:
        """Copy a finished run, and run the stages before the operation."""
        self._small_run.copy_to(folder, without=("shards", "tensorboard", "step-00000002", "step-00000004"))
        self._do(folder, self._earlier_stages)

    def set_up(self, folder: Path) -> Callable[[], Any]:
        return lambda: self._do(folder, self._stages)

    def problems(self, folder: Path, ending: Ending, failed: list[str]) -> list[str]:  # noqa: ARG002 - part of Operation
        """Existing files are unchanged, and what has a manifest is whole. On success, every result is there."""
        template = folder.parent.parent / self.name
        found = [
            f"lost: {name}"
            for name, each in tree(template).items()
            if name not in self._may_change and digest_of(folder / name) != each
        ]
        for name in (_WEIGHTS, _EXPORT, _PUBLISHED):
            if (folder / name / MANIFEST).exists():
                found += _verification_problems(folder / name)
        if ending.succeeded:
            results = {"consolidate": _WEIGHTS, "export": _EXPORT, "certify": _EXPORT, "publish": _PUBLISHED}
            found += [
                f"wrong: {results[each]} is missing"
                for each in self._stages
                if not (folder / results[each] / MANIFEST).exists()
            ]
            if "certify" in self._stages and CERTIFICATE not in Export.load(folder / _EXPORT).files:
                found.append("wrong: the export is not certified")
        return found

    def _do(self, folder: Path, stages: tuple[str, ...]) -> None:
        for stage in stages:
            {"consolidate": _consolidate, "export": _export, "certify": _certify, "publish": _publish}[stage](folder)


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
