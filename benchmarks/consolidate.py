"""Compare consolidation with DeepSpeed's zero_to_fp32 and ``cp``: time, ratio to ``cp``, peak memory above imports.

    python -m benchmarks.consolidate [--parameters 1.1e9] [--rounds 5] [--alone 0.25e9 1.1e9 3e9] [--folder DIR]

Synthetic checkpoints of four ranks (bf16; ZeRO 2, ZeRO 3, and a mixture of experts) are written to files, including
moments. The tools take turns to convert them to one safetensors file, each time in a new process. As much of their
input as fits into memory is in the page cache.

The tools do different amounts of work. ``cp`` copies our result, and ``sync`` waits until the copy is on disk.
Consolidation reads as many bytes of masters as ``cp`` copies, compares them with the bf16 weights (half as many bytes),
and also waits for the disk. zero_to_fp32 neither waits for the disk nor checks anything.

With --alone, consolidation is also measured by itself at other sizes, to show whether its memory grows with the model.
These checkpoints have no moments, which consolidation does not read.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measured_result import Figure, add_into, measured_here, spread
from benchmarks.synthetic_checkpoints import RANKS, TAG, write_experts, write_zero2, write_zero3

CONSOLIDATE = """
from pathlib import Path
from t5train.checkpoint.consolidate import consolidate
run = lambda: consolidate(Path(SOURCE), Path(OUT))
"""
VERIFY = """
from pathlib import Path
from t5train.checkpoint.tags import require_complete
run = lambda: require_complete(Path(SOURCE) / TAG)
"""
ZERO_TO_FP32 = """
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
run = lambda: convert_zero_checkpoint_to_fp32_state_dict(SOURCE, OUT, max_shard_size=None, safe_serialization=True)
"""
MEASURE = """
import json, time
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
imported, start, cpu = status("VmRSS"), time.perf_counter(), time.process_time()
run()
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak": max(status("VmHWM") - imported, 0)}))
"""
CP, OURS, OURS_VERIFIED, VERIFY_ALONE, THEIRS = (
    "`cp` and sync",
    "consolidate; CRC-32 of what is read",
    "consolidate; sha256 of every input file first",
    "of which: sha256 of every input file",
    "zero_to_fp32 --safe_serialization",
)


@dataclass(frozen=True)
class Run:
    """One run of a tool: wall seconds, processor seconds of all its threads, peak bytes above imports."""

    seconds: float
    cpu_seconds: float
    peak: float


class ToolFailed(Exception):
    """A tool failed. The message is the last line of its standard error."""


def in_a_process(code: str, source: Path, out: Path) -> Run:
    """Run a tool in a new interpreter. The time and memory of imports are not counted."""
    program = f"SOURCE, OUT, TAG = {str(source)!r}, {str(out)!r}, {TAG!r}\n{code}{MEASURE}"
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise ToolFailed(done.stderr.strip().splitlines()[-1])
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def copied(file: Path, out: Path) -> Run:
    """Run ``cp``, then ``sync`` on the copy."""
    out.mkdir()
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(["cp", os.fspath(file), os.fspath(out)], check=True)
    subprocess.run(["sync", os.fspath(out / file.name)], check=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Run(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 0)


def with_sidecars(folder: Path, copy: Path) -> None:
    """Link the files of a ZeRO 2 checkpoint to ``copy``, and add sidecars as a run of this project writes them."""
    from t5train.checkpoint import sidecar
    from t5train.checkpoint.consolidate.optimizer_states import packed_slots
    from t5train.checkpoint.consolidate.torch_file import read_metadata
    from t5train.records.digests import digest_files

    tag = copy / TAG
    tag.mkdir(parents=True)
    for path in (folder / TAG).iterdir():
        os.link(path, tag / path.name)
    named = read_metadata(tag / "mp_rank_00_model_states.pt")["param_shapes"][0]
    for rank in range(RANKS):
        names = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"]
        names += ["mp_rank_00_model_states.pt"] if rank == 0 else []
        layout = sidecar.ParallelLayout(
            zero_stage=2, precision="bf16", data_parallel_rank=rank, data_parallel_size=RANKS
        )
        sidecar.write(
            tag,
            sidecar.Sidecar(
                run_fingerprint="0" * 64,
                step=1,
                tag=TAG,
                rank=rank,
                world_size=RANKS,
                layout=layout,
                files=digest_files(tag, names),
                groups=[packed_slots(named.items())],
                huggingface_config={},
                data=sidecar.DataState(samples_consumed=0, shards_fingerprint="0" * 64),
            ),
        )


def measure(folder: Path, rounds: int, *, verified: bool) -> tuple[dict[str, list[Run]], dict[str, str]]:
    """Run every tool once per round. Returns the runs, and the error of each tool that failed, by tool.

    The output of a tool is removed before the next one runs. A tool that failed is not run again.
    """
    plain, reference = folder / "plain", folder / "reference"
    in_a_process(CONSOLIDATE, plain, reference)
    tools: dict[str, Callable[[Path], Run]] = {
        CP: lambda out: copied(reference / "model.safetensors", out),
        OURS: lambda out: in_a_process(CONSOLIDATE, plain, out),
        THEIRS: lambda out: in_a_process(ZERO_TO_FP32, plain, out),
    }
    if verified:
        with_sidecars(plain, folder / "verified")
        tools[OURS_VERIFIED] = lambda out: in_a_process(CONSOLIDATE, folder / "verified", out)
        tools[VERIFY_ALONE] = lambda out: in_a_process(VERIFY, folder / "verified", out)
    found: dict[str, list[Run]] = {name: [] for name in tools}
    failures: dict[str, str] = {}
    for _ in range(rounds):
        for name in [name for name in tools if name not in failures]:
            os.sync()
            try:
                found[name].append(tools[name](folder / "out"))
                if name == THEIRS:
                    require_equal(reference, folder / "out")
            except ToolFailed as failure:
                failures[name] = str(failure).replace(f"{plain}/{TAG}/", "")
            shutil.rmtree(folder / "out", ignore_errors=True)
    return found, failures


def require_equal(ours: Path, theirs: Path) -> None:
    """End the program unless both folders hold the same tensors, bit for bit."""
    from safetensors import safe_open

    wanted = json.loads((ours / "model.tensors.json").read_text())
    with safe_open(theirs / "model.safetensors", "np") as file:
        names = file.keys()  # an open safetensors file is not a mapping and cannot be iterated over
        found = {name: hashlib.sha256(file.get_tensor(name).data).hexdigest() for name in names}
    if found != {name: tensor["sha256"] for name, tensor in wanted.items()}:
        raise SystemExit(f"{ours} and {theirs} differ")


def row(layout: str, name: str, runs: Sequence[Run], reference: float | None) -> dict[str, Figure]:
    """Return what a tool took for a checkpoint."""
    seconds = [run.seconds for run in runs]
    return {
        "checkpoint": layout,
        "tool": name,
        "seconds": spread(seconds, 2),
        "relative to cp and sync": round(statistics.median(seconds) / reference, 2) if reference else None,
        "CPU seconds": round(statistics.median(run.cpu_seconds for run in runs), 2),
        "peak memory above imports, GB": round(max(run.peak for run in runs) / 1e9, 2),
    }


def compare(
    scratch: Path, layout: str, write: Callable[[Path, int], int], parameters: int, rounds: int
) -> Iterator[dict[str, Figure]]:
    """Write one checkpoint, measure every tool on it, and yield what each took, or its error."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        total = write(Path(folder) / "plain", parameters)
        found, failures = measure(Path(folder), rounds, verified=write is write_zero2)
    reference = statistics.median(run.seconds for run in found[CP])
    for name, runs in found.items():
        described = f"{layout}, {total / 1e9:.2f} billion"
        failure: dict[str, Figure] = {"checkpoint": described, "tool": name, "seconds": failures.get(name)}
        yield row(described, name, runs, reference) if runs else failure


def alone(scratch: Path, parameters: int, rounds: int) -> dict[str, Figure]:
    """Return what consolidation takes by itself, a few times on one checkpoint."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        total = write_zero2(Path(folder) / "plain", parameters, moments=False)
        runs = []
        for _ in range(rounds):
            os.sync()
            runs.append(in_a_process(CONSOLIDATE, Path(folder) / "plain", Path(folder) / "out"))
            shutil.rmtree(Path(folder) / "out")
    return row(f"ZeRO 2, {total / 1e9:.2f} billion, alone", OURS, runs, None)


def main() -> None:
    """Measure and print one table."""
    layouts: Mapping[str, Callable[[Path, int], int]] = {
        "ZeRO 2": write_zero2, "ZeRO 3": write_zero3, "mixture of experts": write_experts,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=250e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", type=float, nargs="*", default=[], help="sizes to consolidate without a peer")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder when left out")
    add_into(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        rows = list[dict[str, Figure]]()
        for layout, write in layouts.items():
            rows += compare(Path(scratch), layout, write, int(arguments.parameters), arguments.rounds)
            print(rows[-1], flush=True)
        for parameters in arguments.alone:
            rows.append(alone(Path(scratch), int(parameters), arguments.rounds))
            print(rows[-1], flush=True)
    what = "Consolidating checkpoints, next to cp and zero_to_fp32"
    measured_here(what, rows, f"{arguments.rounds} rounds.").show(arguments.into)


if __name__ == "__main__":
    main()
