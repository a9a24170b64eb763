"""Measure how fast `t5-pretrain predict` is next to the loop that people write, on one device.

::

    python -m benchmarks.prediction 'rows.jsonl#source=en&target=de&prefix=' --root DIR
        (--model FOLDER | --recipe t5_3b --tokenizer spiece.model [--set model.num_layers=2] [--ends])
        [--rows 500] [--beams 1,4] [--max-new-tokens 64] [--dtype float32] [--device cuda]
        [--rounds 3] [--into benchmarks/results/NAME.json]

- predict: what the command does in one process: it reads rows, forms batches of similar length, decodes, and merges.
- loop: ``generate()`` of transformers for 32 rows at a time, in the order of the file.

Both predict the first rows of the file with the same model, from the beginning in each round and in turn, with as many
beams and tokens, and on a CPU in one thread. The time to load the model counts in neither. Tokens are generated ones,
with EOS. Both outputs are compared: padding changes rounding, so that a few differ where two tokens are about equally
likely. A model of a recipe has random weights, of which no hypothesis ends: all have the most tokens. With --ends, each
ends as a translation does: after 1.3 tokens for each of its source, or up to a fifth fewer or more. On a CPU, seconds
are those of the process itself.
"""

import argparse
import itertools
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest import mock

from benchmarks.measured_conditions import device_name, versions
from benchmarks.measured_result import Figure, add_into, measured_here, spread
from benchmarks.random_model import random_model
from t5train.data.vocabulary.tokenizer import given_tokenizer
from t5train.data.worker_processes import Advance, Json
from t5train.errors import T5TrainError
from t5train.inference.model_folder import DType, ModelFolder, chosen_device, quiet_transformers
from t5train.inference.predict.prediction import PredictJob, predict
from t5train.inference.predict.prediction_worker import predict_parts
from t5train.inference.predict.predictions import read_predictions
from t5train.inference.predict.source_rows import source_files, source_rows
from t5train.inference.text.decoding import GenerationSpec
from t5train.progress import silent
from t5train.spec.recipes import recipe

LOOP_ROWS = 32
DTYPES = get_args(DType)
_LOAD = ModelFolder.load


class Subject(NamedTuple):
    """What both predict, and how."""

    model: Path
    rows: Path
    """A file of rows with the prefixes of their tasks."""
    out: Path
    num_beams: int
    most: int
    batch_tokens: int | None
    dtype: DType
    device: str
    ends: bool

    @property
    def spec(self) -> GenerationSpec:
        """How both decode."""
        return GenerationSpec(max_new_tokens=self.most, num_beams=self.num_beams)


class Measured(NamedTuple):
    """The hypotheses, in the order of the rows, and how long they took."""

    texts: list[str]
    tokens: int
    seconds: float
    memory_bytes: int


def _loading(subject: Subject, seconds: list[float]) -> Callable[[ModelFolder, str, DType], Any]:
    """Return a ``ModelFolder.load`` that adds to a list how long it took."""

    def load(folder: ModelFolder, device: str, dtype: DType) -> Any:
        began = _seconds(device)
        model = _LOAD(folder, device, dtype)
        if subject.ends:
            _let_end(model)
        _begin_to_measure(device)
        seconds.append(_seconds(device) - began)
        return model

    return load


def _let_end(model: Any) -> None:
    """Let a random model write EOS when a hypothesis has so many tokens for each of its source."""
    due: Any = None

    def before(_: Any, __: Any, given: dict[str, Any]) -> None:
        nonlocal due
        spread = 0.8 + 0.4 * (1000 * given["encoder_hidden_states"][:, 0, 0] % 1)
        lengths = 1.3 * spread * given["encoder_attention_mask"].sum(1)
        due = lengths <= 1 + given["past_key_values"].get_seq_length()

    def after(_: Any, __: Any, logits: Any) -> None:
        logits[due, :, model.generation_config.eos_token_id] = 1e4

    model.decoder.register_forward_pre_hook(before, with_kwargs=True)
    model.lm_head.register_forward_hook(after)


def by_predict(subject: Subject) -> Measured:
    """Predict as the command does, in this process."""
    shutil.rmtree(subject.out, ignore_errors=True)
    job = PredictJob(subject.model, [f"{subject.rows}#prefix="], subject.out, subject.spec)
    job = job._replace(batch_tokens=subject.batch_tokens, device=subject.device, processes=1, dtype=subject.dtype)
    loading = list[float]()
    with mock.patch.object(ModelFolder, "load", _loading(subject, loading)):
        began = _seconds(subject.device)
        predict(job, workers=_here)
        seconds = _seconds(subject.device) - began - sum(loading)
    rows = list(read_predictions(subject.out))
    return Measured([row.hypothesis for row in rows], sum(row.tokens for row in rows), seconds, _memory(subject.device))


def _here(_: str, jobs: Sequence[Json], advance: Advance) -> Iterator[Json]:
    for job in jobs:
        yield predict_parts(job, advance)


def by_loop(subject: Subject) -> Measured:
    """Predict as people do."""
    import torch

    if subject.device == "cpu":
        torch.set_num_threads(1)  # as predict does
    folder = ModelFolder.open(subject.model)
    model = _loading(subject, [])(folder, subject.device, subject.dtype)
    began = _seconds(subject.device)
    tokenizer = folder.load_tokenizer()
    sources = [json.loads(line)["source"] for line in subject.rows.read_text("utf-8").splitlines()]
    texts, tokens, options = list[str](), 0, subject.spec.options()
    for first in range(0, len(sources), LOOP_ROWS):
        inputs = tokenizer(sources[first : first + LOOP_ROWS], return_tensors="pt", padding=True).to(subject.device)
        with quiet_transformers(), torch.inference_mode():
            found = model.generate(**inputs, **options)
        texts += tokenizer.batch_decode(found, skip_special_tokens=True)
        eos = model.generation_config.eos_token_id
        tokens += sum((ids.index(eos) if eos in ids else len(ids) - 1) + 1 for ids in found[:, 1:].tolist())
    return Measured(texts, tokens, _seconds(subject.device) - began, _memory(subject.device))


CONTENDERS = {"predict": by_predict, "loop": by_loop}


def _seconds(device: str) -> float:
    """Return the time or, on a CPU, that of this process alone: others may use its cores."""
    return time.process_time() if device == "cpu" else time.perf_counter()


def _begin_to_measure(device: str) -> None:
    import torch

    if device != "cpu":
        torch.accelerator.synchronize()
        torch.cuda.reset_peak_memory_stats()


def _memory(device: str) -> int:
    import torch

    return 0 if device == "cpu" else torch.cuda.max_memory_allocated()


def compared(subject: Subject, rounds: int) -> list[dict[str, Figure]]:
    """Measure both in turn, so many times after one that warms up; return a row for each."""
    found: dict[str, list[Measured]] = {name: [] for name in CONTENDERS}
    for number, (name, contender) in itertools.product(range(rounds + 1), CONTENDERS.items()):
        measured = contender(subject)
        if number:
            found[name].append(measured)
        seconds = measured.seconds
        print(f"{subject.num_beams} beams, {name}, {number or 'warm-up'}: {seconds:.1f} s", file=sys.stderr, flush=True)
    ours, loop = found["predict"], found["loop"]
    equal = sum(one == other for one, other in zip(ours[0].texts, loop[0].texts, strict=True))
    ratios = [theirs.seconds / mine.seconds for mine, theirs in zip(ours, loop, strict=True)]
    return [
        {
            "beams": subject.num_beams,
            "program": name,
            "rows": len(each[0].texts),
            "tokens": each[0].tokens,
            "seconds": spread([one.seconds for one in each], 1),
            "tokens/s": spread([one.tokens / one.seconds for one in each], 0),
            "rows/s": spread([len(one.texts) / one.seconds for one in each], 1),
            "GiB": round(max(one.memory_bytes for one in each) / 2**30, 1) or None,
            "times the loop": spread(ratios, 2) if name == "predict" else None,
            "equal texts": equal if name == "predict" else None,
        }
        for name, each in found.items()
    ]


def _subjects(given: argparse.Namespace) -> Iterator[Subject]:
    """Make the model, unless one is given or was made before, and write the rows with their prefixes."""
    root, device = given.root.absolute(), chosen_device(given.device)
    root.mkdir(parents=True, exist_ok=True)
    model = given.model
    if model is None:
        spec = recipe(given.recipe).with_settings(dict(change.split("=", 1) for change in given.set))
        model = random_model(spec, given_tokenizer(Path(given.tokenizer), root), root)
    tasks = ModelFolder.open(model).run.tasks
    rows = source_rows([source_files(given.rows_file, tasks, root, silent)], tasks, Counter())
    file = root / "rows.jsonl"
    lines = (json.dumps({"source": row.source}) for row in itertools.islice(rows, given.rows))
    file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    for beams in map(int, given.beams.split(",")):
        yield Subject(
            model, file, root / "out", beams, given.max_new_tokens, given.batch_tokens, given.dtype, device, given.ends
        )


def _arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("rows_file", help="file of rows, as t5-pretrain predict takes it")
    made.add_argument("--root", type=Path, required=True, help="folder for the model and the predictions")
    made.add_argument("--model", type=Path, help="folder of a T5")
    made.add_argument("--recipe", help="recipe whose model gets random weights, instead of --model")
    made.add_argument("--tokenizer", help="spiece.model, or folder with one, of such a model")
    made.add_argument("--set", action="append", default=[], metavar="PART.KEY=VALUE", help="setting of such a model")
    made.add_argument("--ends", action="store_true", help="let hypotheses of such a model end")
    made.add_argument("--rows", type=int, default=500, help="rows to predict, the first of the file")
    made.add_argument("--beams", default="1,4", help="comma-separated numbers of beams; 1 is greedy")
    made.add_argument("--max-new-tokens", type=int, default=64)
    made.add_argument("--batch-tokens", type=int, help="of predict")
    made.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights, for both")
    made.add_argument("--device", help="such as cuda:0 or cpu; an accelerator, if there is one, if left out")
    made.add_argument("--rounds", type=int, default=3, help="measurements of each, in turn, after one of each")
    add_into(made)
    given = made.parse_args()
    if (given.model is None) == (given.recipe is None) or (given.recipe and not given.tokenizer):
        made.error("name --model, or --recipe with --tokenizer")
    return given


def main() -> int:
    """Measure, and print the table."""
    given = _arguments()
    try:
        subjects = list(_subjects(given))
        rows = [row for subject in subjects for row in compared(subject, given.rounds)]
    except T5TrainError as error:
        raise SystemExit(str(error)) from None
    device = subjects[0].device
    used = ", ".join(f"{name} {version}" for name, version in versions() if name in {"python", "torch", "transformers"})
    ends = "hypotheses end after 1.04 to 1.56 tokens for each of the source" if given.ends else "no hypothesis ends"
    made = "" if given.model else f" Random weights of {given.recipe}: {ends}."
    notes = f"{used}; {device if device == 'cpu' else device_name(device.partition(':')[0])}, {given.dtype}."
    what = "Predicting next to the loop that people write, on one device"
    measured_here(what, rows, f"{notes}{made}").show(given.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
