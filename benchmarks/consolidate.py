"""Consolidation beside DeepSpeed's zero_to_fp32 and ``cp``: time, ratio to ``cp``, peak memory above imports.

    python benchmarks/consolidate.py [--parameters 250e6] [--rounds 3] [--folder DIR]

A synthetic dense checkpoint (ZeRO 2, bf16, 4 ranks) is written as files; then each tool turns it into one
safetensors file, in turns and each time in a process of its own, with the input in the page cache. ``cp`` copies
that file; as consolidation syncs what it writes, the ``cp`` it is compared with is followed by a sync too.
"""

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hardware import hardware

RANKS, TAG = 4, "global_step1"
CONSOLIDATE = """
from pathlib import Path
from t5train.consolidate import consolidate
run = lambda: consolidate(Path(SOURCE), Path(OUT))
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


def shapes(parameters: int) -> OrderedDict[str, tuple[int, ...]]:
    """An embedding, then feed-forward layers, until there are about this many parameters."""
    found: OrderedDict[str, tuple[int, ...]] = OrderedDict({"shared.weight": (32128, 1024)})
    total, block = 32128 * 1024, 0
    while total < parameters:
        layer = {"wi_0.weight": (2816, 1024), "wi_1.weight": (2816, 1024), "wo.weight": (1024, 2816), "norm": (1024,)}
        found |= {f"block.{block}.{name}": shape for name, shape in layer.items()}
        total += sum(math.prod(shape) for shape in layer.values())
        block += 1
    return found


def write_checkpoint(folder: Path, parameters: int) -> int:
    """Files as DeepSpeed writes them, optimizer moments included; the number of parameters."""
    import torch

    tag = folder / TAG
    tag.mkdir(parents=True)
    (folder / "latest").write_text(TAG)
    named = {name: torch.Size(shape) for name, shape in shapes(parameters).items()}
    total = sum(shape.numel() for shape in named.values())
    size = -(-total // (2 * RANKS)) * 2
    flat = torch.randn(size * RANKS, generator=torch.Generator().manual_seed(0))
    for rank in range(RANKS):
        master = flat[rank * size : min((rank + 1) * size, total)].clone()
        moments = {0: {"exp_avg": torch.full_like(master, 0.1), "exp_avg_sq": torch.full_like(master, 0.2)}}
        state = {
            "zero_stage": 2,
            "single_partition_of_fp32_groups": [master],
            "partition_count": [RANKS],
            "param_alignment_paddings": [[0] * len(named)],
            "base_optimizer_state": {"state": moments},
        }
        torch.save({"optimizer_state_dict": state}, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    module, offset = {}, 0
    for name, shape in named.items():
        module[name] = flat[offset : offset + shape.numel()].view(shape).bfloat16()
        offset += shape.numel()
    model = {"module": module, "buffer_names": [], "param_shapes": [OrderedDict(named)], "shared_params": {}}
    model |= {"frozen_param_shapes": None, "frozen_param_fragments": None, "dp_world_size": RANKS, "global_steps": 1}
    torch.save(model | {"ds_version": "0.19.8", "optimizer": None}, tag / "mp_rank_00_model_states.pt")
    return total


def with_sidecars(folder: Path, copy: Path) -> None:
    """The same files with sidecars, as a run of this project leaves them."""
    from t5train import sidecar
    from t5train.consolidate.flat_groups import packed_slots
    from t5train.consolidate.metadata import read_metadata
    from t5train.records import digest_files

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


@dataclass(frozen=True)
class Run:
    """One run of a tool: wall seconds, processor seconds of all its threads, peak bytes above imports."""

    seconds: float
    cpu_seconds: float
    peak: float


def in_a_process(code: str, source: Path, out: Path) -> Run:
    """Run a tool in a fresh interpreter; imports are not counted."""
    program = f"SOURCE, OUT = {str(source)!r}, {str(out)!r}\n{code}{MEASURE}"
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def copied(file: Path, out: Path, *, sync: bool) -> Run:
    """Run ``cp``, with or without a sync of the copy."""
    out.mkdir()
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(["cp", os.fspath(file), os.fspath(out)], check=True)
    if sync:
        subprocess.run(["sync", os.fspath(out / file.name)], check=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Run(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 0)


def measure(folder: Path, rounds: int) -> dict[str, list[Run]]:
    """Every tool once a round, in turns; what it wrote is removed before the next."""
    plain, verified, reference = folder / "plain", folder / "verified", folder / "reference"
    in_a_process(CONSOLIDATE, plain, reference)
    file = reference / "model.safetensors"
    tools: dict[str, Callable[[Path], Run]] = {
        "cp + sync": lambda out: copied(file, out, sync=True),
        "consolidate": lambda out: in_a_process(CONSOLIDATE, plain, out),
        "zero_to_fp32 --safe_serialization": lambda out: in_a_process(ZERO_TO_FP32, plain, out),
        "cp": lambda out: copied(file, out, sync=False),
        "consolidate, sha256 of every input verified": lambda out: in_a_process(CONSOLIDATE, verified, out),
    }
    found: dict[str, list[Run]] = {name: [] for name in tools}
    for _ in range(rounds):
        for name, tool in tools.items():
            os.sync()
            found[name].append(tool(folder / "out"))
            shutil.rmtree(folder / "out")
    return found


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=250e6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder when left out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        folder = Path(scratch)
        total = write_checkpoint(folder / "plain", int(arguments.parameters))
        with_sidecars(folder / "plain", folder / "verified")
        found = measure(folder, arguments.rounds)
    load = os.getloadavg()[0]
    print(f"{total / 1e6:.0f} M parameters, {4 * total / 1e9:.2f} GB of fp32; {arguments.rounds} rounds; {hardware()}")
    print(f"load average at the end {load:.1f}\n")
    print("| tool | seconds, median (least - most) | x (cp + sync) | processor seconds | peak above imports, GB |")
    print("|---|---|---|---|---|")
    reference = statistics.median(run.seconds for run in found["cp + sync"])
    for name, runs in found.items():
        print(row(name, runs, reference))


def row(name: str, runs: list[Run], reference: float) -> str:
    """One line of the table."""
    seconds = sorted(run.seconds for run in runs)
    median, cpu = statistics.median(seconds), statistics.median(run.cpu_seconds for run in runs)
    peak = max(run.peak for run in runs) / 1e9
    spread = f"{seconds[0]:.2f} - {seconds[-1]:.2f}"
    return f"| {name} | {median:.2f} ({spread}) | {median / reference:.2f} | {cpu:.2f} | {peak:.2f} |"


if __name__ == "__main__":
    main()
