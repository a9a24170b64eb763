"""Measure every variant on this machine's accelerators, from tokens to certified export: speed, memory, and the proof.

    python -m tests.acceptance.variants.measure_all --corpus TEXT --tokenizer SPIECE [--out FOLDER] [--only NAME ...]
        [--beside]
    python -m tests.acceptance.variants.measure_all --list | --table [--out FOLDER]

Each case is a run of the program's own stages. After each case, also after a failed one, a line is appended to
FOLDER/results.jsonl. A case that has a line is not run again: repeat the command to continue, and remove a line to
repeat its case. At the end, the command prints a table of all lines, and which cases were not run and why. Without
--keep, it removes the files of a run that passed, and checkpoints as soon as they are consolidated.

MFU is the rate of the model's matrix products (see t5train/train/flops.py), relative to --peak-teraflops. Its default
is what an H200 was measured to multiply in bf16. Only the accelerators in CUDA_VISIBLE_DEVICES are used, so that two of
these commands, each with its own results, can share a machine.
"""

import argparse
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from t5train.errors import SpecError
from tests.acceptance.result_table import ResultLines
from tests.acceptance.variants.machine_memory import memory_bytes
from tests.acceptance.variants.variant_cases import CASES, Case
from tests.acceptance.variants.variant_runs import Row, Runner, with_mfu
from tests.acceptance.variants.variant_table import listing, table
from tests.support.hardware import hardware

H200_TERAFLOPS = 790.0


def main() -> None:
    """Run the cases that can be run here and have no result yet, then print everything."""
    options = _options()
    if options.list:
        print(listing(CASES))
        return
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    results = ResultLines(out / "results.jsonl")
    skipped = {} if options.table else _run(results, out, options)
    peak = options.peak_teraflops * 1e12
    print(f"\n{table([with_mfu(row, peak) for row in results.rows()])}")
    for name, reason in skipped.items():
        print(f"not run: {name}: {reason}")


def _run(results: ResultLines, out: Path, options: argparse.Namespace) -> dict[str, str]:
    """Run the cases in order; return why the others were not run."""
    runner = Runner((options.root or out / "work").absolute(), tiny=options.tiny, keep=options.keep)
    deadline = None if options.until_seconds is None else time.monotonic() + options.until_seconds
    runner.tokenize(options.corpus, options.tokenizer)
    skipped, finished = {}, {row["name"] for row in results.rows()}
    with ThreadPoolExecutor(max_workers=1) as executor:
        certifications: list[Future[None]] = []
        for case in CASES:
            if case.name in finished or (options.only and case.name not in options.only):
                continue
            if reason := _reason_to_skip(case, runner, deadline):
                skipped[case.name] = reason
                continue
            row = {**runner.train(case, deadline), "machine": _machine(), "date": time.strftime("%Y-%m-%d")}
            certifications.append(executor.submit(_certify, runner, case, row, results.append))
            if not options.beside:
                certifications[-1].result()
        for certification in certifications:
            certification.result()
    return skipped


def _certify(runner: Runner, case: Case, row: Row, append: Callable[[Row], None]) -> None:
    append(row := runner.certify(case, row))
    print(f"{row['name']}: {'passed' if row['passed'] else 'FAILED'} {row.get('error', '')}", flush=True)


def _reason_to_skip(case: Case, runner: Runner, deadline: float | None) -> str:
    """Why a case cannot be run here and now; empty if it can."""
    try:
        runner.spec(case)
    except SpecError as error:
        return str(error)
    if deadline is not None and case.seconds > (seconds_left := deadline - time.monotonic()):
        return f"not enough time: it needs about {case.seconds} s, and {seconds_left:.0f} s are left"
    return "" if runner.tiny else _missing_resources(case, runner.root)


def _missing_resources(case: Case, root: Path) -> str:
    needs = {
        "accelerators": (case.ranks, torch.accelerator.device_count()),
        "GB of host memory": (case.host_gigabytes, memory_bytes("MemAvailable") // 10**9),
        "GB of disk space": (case.disk_gigabytes, shutil.disk_usage(root).free // 10**9),
    }
    missing = [
        f"it needs {needed} {what}, and {available} are available"
        for what, (needed, available) in needs.items()
        if needed > available
    ]
    return "; ".join(missing)


def _machine() -> str:
    available = torch.accelerator.device_count()
    kind = f"{available} {torch.get_device_module().get_device_name(0)}, " if available else ""
    return f"{kind}{hardware()}, torch {torch.__version__}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", help="text: path, pattern or URL")
    parser.add_argument("--tokenizer", help="a spiece.model or a Hugging Face folder")
    parser.add_argument("--out", type=Path, default=Path("work/variants"), help="folder of results.jsonl")
    parser.add_argument("--root", type=Path, help="folder for runs in progress (default: OUT/work)")
    parser.add_argument("--only", nargs="+", default=[], choices=[case.name for case in CASES], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="show the cases and about how long they take")
    parser.add_argument("--table", action="store_true", help="show the lines of OUT/results.jsonl, and run nothing")
    parser.add_argument("--beside", action="store_true", help="certify each model while the next one is trained")
    parser.add_argument(
        "--tiny", action="store_true", help="try this program with models of the demo's size on the CPU"
    )
    parser.add_argument("--keep", action="store_true", help="remove nothing")
    parser.add_argument("--until-seconds", type=float, help="start no case that would end later than this")
    parser.add_argument("--peak-teraflops", type=float, default=H200_TERAFLOPS, help="peak of one accelerator in bf16")
    options = parser.parse_args()
    if not (options.list or options.table or (options.corpus and options.tokenizer)):
        parser.error("--corpus and --tokenizer are required: the text and the vocabulary to train on")
    return options


if __name__ == "__main__":
    main()
