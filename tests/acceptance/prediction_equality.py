"""Compare 500 predictions of `t5-pretrain predict` with those of a plain transformers script, and kill it ten times.

::

    python -m tests.acceptance.prediction_equality [--sources 500] [--kills 10] [--root DIR] [--into JSON]

The command predicts held-out sources in three processes, and in many batches: greedily, and with 4 beams. The script
decodes one source at a time in fp32. Padding rounds logits otherwise, so where another token is as likely to within
NEAR_TIE, another may be chosen: such near-ties are counted and shown, and any other difference fails. So does a file
that differs after the command was killed (SIGKILL, with all its processes) at random moments and repeated. The model is
fine-tuned for the purpose by the recipe reverse_and_sort; in a root that is given, once.
"""

import argparse
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from benchmarks.measured_conditions import commit
from benchmarks.measured_result import Figure, Result, add_into
from t5train.inference.predict.batch_plan import BatchLimits, batch_plan
from t5train.inference.predict.prediction_worker import PARTS
from t5train.inference.predict.predictions import PREDICTIONS, Prediction, read_predictions
from tests.acceptance.finetuning_trial import Trial
from tests.support.hardware import hardware
from tests.support.waiting import await_that

NEAR_TIE = 1e-4
"""Of logits, which are about 10 here, and of the scores of beams: rounding in fp32 changes them by about 1e-5."""
BEAMS = (1, 4)
MOST = 24
_BATCH_TOKENS = 160  # four short sources: many batches, whose padding differs
_LAST_PARTS, _LONGEST_PAUSE_SECONDS = 40, 0.02
"""So many parts take longer than the longest pause before a kill, so that no kill comes after the end."""


class Difference(NamedTuple):
    """A prediction that is not that of the plain script."""

    source: str
    ours: str
    plain: str
    near_tie: bool

    def __str__(self) -> str:
        return f"{self.source!r}: {self.ours!r} instead of {self.plain!r}"


class Plain:
    """The script that people write: one source at a time."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        self._model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def differences(self, predictions: Sequence[Prediction], num_beams: int, most: int) -> Iterator[Difference]:
        """Yield the predictions that are not what the script writes, with at most so many tokens."""
        alternatives = self._greedy if num_beams == 1 else self._of_beams
        for row in predictions:
            inputs = self._tokenizer(row.source, return_tensors="pt")
            kept = {"output_scores": True, "return_dict_in_generate": True, "num_return_sequences": num_beams}
            found = self._model.generate(**inputs, num_beams=num_beams, max_new_tokens=most, **kept)
            plain = self._text(found.sequences[0].tolist())
            if row.hypothesis != plain:
                near_tie = alternatives(found, row.hypothesis)
                yield Difference(row.source, row.hypothesis, plain, near_tie)

    def parts(self, predictions: Sequence[Prediction], num_beams: int) -> int:
        """Return in how many parts the command predicts."""
        lengths = np.array([len(self._tokenizer(row.source).input_ids) for row in predictions])
        return batch_plan(lengths, BatchLimits(_BATCH_TOKENS * num_beams, len(lengths), num_beams, MOST)).num_parts

    def _greedy(self, found: Any, ours: str) -> bool:
        """Whether our text goes on with a token of about the same logit where it leaves the plain one."""
        import torch

        ids = found.sequences[0].tolist()
        for place, logits in enumerate(torch.cat(found.scores)):
            before = ids[: place + 1]  # with the token that starts the decoder
            if not ours.startswith(self._text(before)):
                return False
            close = (logits >= logits[ids[place + 1]] - NEAR_TIE).nonzero().flatten().tolist()
            others = [[*before, each] for each in close if each != ids[place + 1]]
            if any(self._text(each) == ours or self._continues(each, ours) for each in others):
                return True
        return False

    def _continues(self, ids: list[int], ours: str) -> bool:
        return ids[-1] not in self._tokenizer.all_special_ids and ours.startswith(self._text(ids))

    def _of_beams(self, found: Any, ours: str) -> bool:
        """Whether our text is another beam with about the best score."""
        best = found.sequences_scores[0]
        return any(
            best - score < NEAR_TIE and self._text(ids) == ours
            for ids, score in zip(found.sequences.tolist(), found.sequences_scores, strict=True)
        )

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class Command(NamedTuple):
    """The command that predicts, and its folder."""

    model: Path
    sources: Path
    out: Path
    num_beams: int

    def start(self) -> "subprocess.Popen[bytes]":
        """Start it in a session of its own, so that all of its processes can be killed at once."""
        command = [sys.executable, "-m", "flows.cli", "predict", self.model, f"{self.sources}#prefix="]
        command += ["--out", self.out, "--device", "cpu", "--processes", 3, "--num-beams", self.num_beams]
        command += ["--max-new-tokens", MOST, "--batch-tokens", _BATCH_TOKENS * self.num_beams]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([*map(str, command)], start_new_session=True, **quiet)

    def finish(self) -> bytes:
        """Run it to its end, and return the predictions. Raises RuntimeError if it fails."""
        if code := self.start().wait():
            raise RuntimeError(f"predict ended with {code}")
        return (self.out / PREDICTIONS).read_bytes()

    def parts(self) -> int:
        """How many parts are done."""
        return len([*self.out.glob(PARTS)])

    def kill_after(self, parts: int, seconds: float) -> bool:
        """Start it, and kill it so many seconds after so many parts are done. Returns whether it still ran."""
        process = self.start()
        await_that(partial(self._has, parts, process))
        time.sleep(seconds)
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait() == -signal.SIGKILL

    def _has(self, parts: int, process: "subprocess.Popen[bytes]") -> bool:
        return self.parts() >= parts or process.poll() is not None


def prove(
    model: Path, sources: Path, folder: Path, kills: int, draw: random.Random
) -> tuple[list[Mapping[str, Figure]], list[str]]:
    """Predict, compare and kill. Return a row for each way to decode, and what is wrong."""
    plain, rows, wrong = Plain(model), list[Mapping[str, Figure]](), list[str]()
    for num_beams in BEAMS:
        command = Command(model, sources, folder / f"{num_beams}", num_beams)
        undisturbed = command.finish()
        predictions = list(read_predictions(command.out))
        differing = list(plain.differences(predictions, num_beams, MOST))
        for each in differing:
            print(f"{'near-tie' if each.near_tie else 'WRONG'}, {num_beams} beams: {each}", flush=True)
        wrong += [f"{num_beams} beams: {each}" for each in differing if not each.near_tie]
        killed = command._replace(out=folder / f"{num_beams}-killed")
        moments = sorted(draw.sample(range(plain.parts(predictions, num_beams) - _LAST_PARTS), kills // len(BEAMS)))
        hit = [killed.kill_after(parts, draw.random() * _LONGEST_PAUSE_SECONDS) for parts in moments]
        same = killed.finish() == undisturbed
        wrong += [] if same else [f"{num_beams} beams: another file after kills"]
        wrong += [] if all(hit) else [f"{num_beams} beams: {hit.count(False)} kills came after the end"]
        rows.append(
            {
                "beams": num_beams,
                "sources": len(predictions),
                "texts": len({each.hypothesis for each in predictions}),
                "ended": sum(each.ended for each in predictions),
                "right": sum(each.hypothesis == each.reference for each in predictions),
                "equal": len(predictions) - len(differing),
                "near-ties": sum(each.near_tie for each in differing),
                "other differences": sum(not each.near_tie for each in differing),
                "kills": len(hit),
                "same file": "yes" if same else "NO",
            }
        )
    return rows, wrong


def _write_sources(trial: Trial, count: int, file: Path) -> Path:
    """Write held-out pairs to a file of rows."""
    pairs = [pair for split in ("test", "validation") for pair in trial.pairs(split)][:count]
    if len(pairs) < count:
        raise SystemExit(f"--sources is {count}, but {trial.root} has {len(pairs)} held-out pairs: choose fewer")
    file.write_bytes(b"".join(orjson.dumps(pair._asdict()) + b"\n" for pair in pairs))
    return file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, default=500)
    parser.add_argument("--kills", type=int, default=10, help="half of them greedily, half with beams")
    parser.add_argument("--seed", type=int, default=0, help="decides when the command is killed")
    parser.add_argument("--root", type=Path, help="root in which the model is made, or was by this command")
    add_into(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="predicting-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        trial = Trial((options.root or folder / "root").absolute(), seed=0)
        if not trial.published.exists():
            trial.finish()
        sources = _write_sources(trial, options.sources, folder / "sources.jsonl")
        rows, wrong = prove(trial.published, sources, folder, options.kills, random.Random(options.seed))
    said = f"Near-ties are within {NEAR_TIE:g}. {'; '.join(wrong[:5])}".rstrip()
    Result(
        what="Predictions of a fine-tuned model, beside a plain transformers script",
        command=f"python -m tests.acceptance.prediction_equality {shlex.join(sys.argv[1:])}".rstrip(),
        commit=commit(),
        machine=hardware(),
        notes=f"Load average {os.getloadavg()[0]:.1f}. {said}",
        rows=rows,
    ).show(options.into)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
