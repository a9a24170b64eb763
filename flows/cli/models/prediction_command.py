"""``predict``: what a model writes for each row of files."""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

from flows.cli.interruption import interrupt_on_stop
from flows.cli.models.model_commands import (
    BeamsOption,
    DeviceOption,
    ModelArgument,
    SampleOption,
    TemperatureOption,
    TopPOption,
)
from flows.cli.options import HostOptions, JsonOption, RootOption, with_options
from flows.cli.stage_commands import require_finished
from flows.cli.terminal import say, stage_display
from t5train.errors import InputError, SpecError, T5TrainError
from t5train.files.os_errors import naming
from t5train.quantities import quantity
from t5train.spec import MachinesSpec
from t5train.spec.pairs_spec import location_of

_STANDARD = ("-", "/dev/stdin")
"""Names of standard input. The shell's words that begin with ``-#`` would be options."""
_COPY = "standard-input"


@with_options
def predict(  # noqa: PLR0913, PLR0917 - one for each option
    hosts: HostOptions,
    path: ModelArgument,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Sources, with references or without: a path, pattern or URL, and columns, such as "
            "'wmt.jsonl#source=en&target=de&task=en-de'; lines of a .txt; - or /dev/stdin",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the result", show_default="standard output", readable=False),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of a hypothesis",
            show_default="those of the longest reference and a quarter, else those of targets in training",
        ),
    ] = None,
    num_beams: BeamsOption = 1,
    length_penalty: Annotated[float, typer.Option(min=-100, max=100, help="Of beams: more prefers longer texts")] = 1.0,
    sample: SampleOption = False,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of sampling; the same seed, the same result")] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="What to compute in; half is faster on GPUs")
    ] = "float32",
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of sources and hypotheses in memory at once, once for each beam",
            show_default="as memory allows",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; changes no result", show_default="one for each accelerator, else core"),
    ] = None,
    device: DeviceOption = None,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict what a model writes for each row of files, on all devices. The same command continues after a kill.

    With --hostfile, all its hosts do so, with a process for each slot. They need not share any folder.

    $ t5-pretrain predict work/published/digits 'rows.txt#task=sort_digits'
    $ t5-pretrain predict MODEL 'wmt.tsv#source=en&target=de' --out predicted
    $ t5-pretrain predict MODEL rows.txt --out predicted --hostfile hosts
    $ t5-pretrain predict MODEL - --num-beams 4 --max-new-tokens 100 < rows.txt
    """
    if as_json and out is None:
        raise typer.BadParameter("it needs --out: without it, what is printed is JSON already", param_hint="--json")
    spec = MachinesSpec.of(hosts.settings())
    _require_together(spec.cluster.hostfile, out, processes)
    require_finished(os.fspath(path.absolute()))
    if out is None and sys.stdout is None:  # it was closed when Python started
        raise SpecError("predictions are written to standard output, but it is closed. Set --out to a folder")
    from t5train.inference.predict.prediction import PredictJob  # imports numpy and more
    from t5train.inference.predict.prediction import predict as predict_rows
    from t5train.inference.predict.predictions import PREDICTIONS
    from t5train.inference.text.decoding import GenerationSpec

    decoding = GenerationSpec.of(
        max_new_tokens=max_new_tokens,
        num_beams=num_beams,
        sample=sample,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        length_penalty=length_penalty,
    )
    interrupt_on_stop()  # so that no text stays in a temporary folder
    with TemporaryDirectory(prefix="t5-predict-") as temporary, _naming_input(temporary), stage_display() as progress:
        folder = Path(temporary, "predictions") if out is None else out
        named = _without_standard_input(files, Path(temporary))
        job = PredictJob(path, named, folder, decoding, batch_tokens, device, processes, root, dtype=dtype)
        if spec.cluster.hostfile is not None:
            from infra.head.predicting.hosts_predictor import predicting_hosts

            job = job._replace(machines=partial(predicting_hosts, spec, device, progress))
        predicted = predict_rows(job, progress)
        if out is None:
            with open(folder / PREDICTIONS, "rb") as lines, naming(PurePath("standard output")):
                shutil.copyfileobj(lines, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return
    if as_json:
        say(predicted.model_dump_json(indent=1))
    else:
        say(f"{quantity(predicted.rows, 'prediction')}: {out / PREDICTIONS}")


def _require_together(hostfile: Path | None, out: Path | None, processes: int | None) -> None:
    if hostfile is not None and out is None:
        raise typer.BadParameter("it needs --out: a folder keeps what hosts have predicted", param_hint="--hostfile")
    if hostfile is not None and processes is not None:
        raise typer.BadParameter("with --hostfile, its slots are the processes of each host", param_hint="--processes")


@contextmanager
def _naming_input(folder: str) -> Iterator[None]:
    """Let errors speak of standard input instead of its copy in a folder, which is gone when they are read."""
    try:
        yield
    except T5TrainError as error:
        copy = re.compile(re.escape(f"{folder}/{_COPY}") + r"\.[a-z]+")
        if (said := copy.sub("standard input", str(error))) == str(error):
            raise
        raise type(error)(said) from error.__cause__


def _without_standard_input(files: Sequence[str], folder: Path) -> list[str]:
    """Return the names of files; that of standard input after copying it to a folder.

    With a column (``/dev/stdin#source=en``), it has lines of JSON, else of text. Raises InputError if it is closed, or
    named more than once.
    """
    standard = [each for each in files if location_of(each) in _STANDARD]
    if len(standard) > 1:
        raise InputError(f"FILE is standard input {len(standard)} times, but it can be read only once. Name it once")
    if standard and sys.stdin is None:  # it was closed when Python started
        location = location_of(standard[0])
        raise InputError(f"FILE is {location}, but standard input is closed. Redirect a file to it (< FILE)")
    return [_copied(each, folder) if each in standard else each for each in files]


def _copied(named: str, folder: Path) -> str:
    choices = named.removeprefix(location_of(named))
    copy = folder / f"{_COPY}{'.jsonl' if 'source=' in choices else '.txt'}"
    with open(copy, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return f"{copy}{choices}"
