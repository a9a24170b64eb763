"""Plant random single faults in exports, and count how many the certificate refuses.

    python -m tests.acceptance.certificate_faults [--trials 600] [--seed 0] [--only FILE]

Each fault changes one parsed value of a published file before certification. The digests in the manifest and in the
model card are rewritten to match, as if the export had made the file so: only a comparison with what training recorded
can refuse the fault. The card's metrics, too, follow a changed ``metrics.json``, of which all that the certificate
compares is changed; the digests in it are those of the evaluation. A fault that changes no parsed value is not counted.
The command prints the planted and refused faults by file and kind, and by kind of model. It fails unless every fault is
refused and every sound export is certified. Any value of any document may be chosen; the seed decides which.
"""

import argparse
import itertools
import logging
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from t5train.errors import CertificationError, InputError, RecordError
from t5train.inference.evaluation import export_evaluation
from t5train.inference.evaluation.metrics_comparison import compare_metrics
from t5train.inference.predict.prediction import predict
from t5train.records.digests import digest_file
from t5train.records.evaluation_metrics import EVALUATION_METRICS
from t5train.records.stage_records import Export
from t5train.records.witness import Witness
from t5train.release.certification import certify
from t5train.release.export import card_of, export
from t5train.release.model_card import README
from tests.acceptance.file_faults import FAULTS, parsed
from tests.support.evaluated_exports import evaluable, predict_here
from tests.support.synthetic_models import make_trained

FAMILIES = {"v1.0": 1, "v1.1": 1, "switch": 3, "pairs": 1, "lora": 1, "evaluated": 1}
"""The kinds of models, and the number of weight files of each."""


class IntactExport(NamedTuple):
    exported: Export
    witness: Path
    start: str | None

    def certify(self) -> None:
        certify(self.exported.path, self.witness, start_from=self.start, compare_metrics=compare_metrics)


Table = dict[tuple[str, str, str], Counter[str]]
"""Faults planted and refused, by kind of model, file and kind of fault."""


def campaign(folder: Path, trials: int, seed: int, only: str | None = None) -> tuple[Table, list[str]]:
    """Plant the faults; return the counts, and a description of every fault that was certified."""
    intact = {version: _make_intact(folder / version, version, files) for version, files in FAMILIES.items()}
    for each in intact.values():
        each.certify()
        (each.exported.path / "certificate.json").unlink()
    generator = random.Random(seed)
    table: Table = {}
    missed = []
    choices = _choices(intact, only)
    for trial in range(trials):
        version, name, kind = choices[trial % len(choices)]
        with _planted(intact[version], name, kind, generator) as described:
            if described is None:
                continue
            count = table.setdefault((version, _file_kind(name), kind), Counter(planted=0, refused=0))
            count["planted"] += 1
            refused = _is_refused(intact[version])
            count["refused"] += refused
        if not refused:
            missed.append(f"trial {trial}, {version}, {name}, {kind}: {described}")
    return table, missed


def _make_intact(folder: Path, version: str, num_files: int) -> IntactExport:
    if version == "evaluated":
        made = evaluable(folder)
        with mock.patch.object(export_evaluation, "predict", partial(predict, workers=predict_here)):
            return IntactExport(made.evaluate(), made.run / "witness", None)
    trained = make_trained(folder, version, num_files)
    return IntactExport(export(*trained, folder / "export"), trained.witness, trained.spec.model.start_from)


def _choices(intact: dict[str, IntactExport], only: str | None) -> list[tuple[str, str, str]]:
    """Every kind of fault in every file of every export.

    Each kind comes once, in exports of one version after another, before any comes again.
    """
    alike: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for version, each in intact.items():
        for name in sorted(each.exported.files):
            for kind in FAULTS[_file_kind(name)] if only is None or name == only else ():
                alike.setdefault((_file_kind(name), kind), []).append((version, name, kind))
    turned = [[*every[turn % len(every) :], *every[: turn % len(every)]] for turn, every in enumerate(alike.values())]
    return [choice for each_once in itertools.zip_longest(*turned) for choice in each_once if choice is not None]


def _file_kind(name: str) -> str:
    return "weights" if name.endswith(".safetensors") else name


@contextmanager
def _planted(intact: IntactExport, name: str, kind: str, generator: random.Random) -> Iterator[str | None]:
    """Plant a fault in the sealed export, and undo it afterwards.

    Yields its description, or None if nothing changed.
    """
    exported = intact.exported
    path, card, manifest = (exported.path / each for each in (name, README, "manifest.json"))
    originals = {each: each.read_bytes() for each in (card, manifest, path)}
    content, described = FAULTS[_file_kind(name)][kind](originals[path], generator)
    if parsed(name, content) == parsed(name, originals[path]):
        yield None
        return
    try:
        path.unlink()  # it may be a link to the run's weights
        path.write_bytes(content)
        changed = {name: digest_file(path)}
        if name != README:
            old, new = (files[name].sha256.encode() for files in (exported.files, changed))
            card.write_bytes(originals[card].replace(old, new))
            if name == EVALUATION_METRICS:
                with suppress(RecordError):  # it cannot be parsed
                    files = exported.files | changed
                    made = card_of(exported.model_copy(update={"files": files}), Witness.load(intact.witness))
                    card.write_text(made, "utf-8")
            changed[README] = digest_file(card)
        exported.model_copy(update={"files": exported.files | changed}).commit()
        yield described
    finally:
        for each, original in originals.items():
            each.write_bytes(original)


def _is_refused(intact: IntactExport) -> bool:
    """Whether certification refuses the export. Any other error is a bug of this project, and is raised."""
    try:
        intact.certify()
    except (CertificationError, InputError):
        return True
    (intact.exported.path / "certificate.json").unlink()
    return False


def _lines(table: Table) -> Iterator[str]:
    by_fault, by_family, total = dict[str, Counter[str]](), dict[str, Counter[str]](), Counter[str]()
    for (family, file, kind), count in sorted(table.items(), key=lambda item: item[0][1:]):
        by_fault.setdefault(f"{file:32}{kind}", Counter()).update(count)
        by_family.setdefault(f"all of {family}", Counter()).update(count)
        total.update(count)
    yield f"{'file':32}{'fault':28}{'planted':>8}{'refused':>8}"
    for name, count in (by_fault | by_family | {"all": total}).items():
        yield f"{name:60}{count['planted']:8}{count['refused']:8}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="change only this file, such as tokenizer.json")
    arguments = parser.parse_args()
    logging.disable()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        table, missed = campaign(Path(folder), arguments.trials, arguments.seed, arguments.only)
    sys.stdout.write("\n".join([*_lines(table), *missed]) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
