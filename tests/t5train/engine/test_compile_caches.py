"""What torch.compile and Triton generate is found again by the next attempt, on the same machine."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from infra.node import node_folders
from infra.node.attempts.attempt import Attempt, begin
from infra.node.attempts.rank_environment import rank_environment
from infra.node.operator_folder import CACHES
from infra.node.processes import ProcessIdentity
from tests.support.needed_triton import require_triton

pytestmark = pytest.mark.slow
require_triton()

COMPILES = """
import json, os, sys, warnings

warnings.simplefilter("ignore")
os.environ.update(json.loads(sys.argv[1]))
os.environ["TRITON_INTERPRET"] = "1"
import torch
from torch._dynamo.utils import counters

from t5train.model.feed_forward import GatedFeedForward
from t5train.model.kernels import gated_gelu
from t5train.model.model_shape import resolve
from t5train.spec import ModelSpec

torch.manual_seed(0)
layer = GatedFeedForward(resolve(ModelSpec(preset="smoke", d_model=8, d_ff=16), 300))
gated_gelu.use_in(layer)
layer.compile(dynamic=False, fullgraph=True)
layer(torch.ones(2, 3, 8)).square().mean().backward()
found = counters["inductor"]
print(json.dumps([found["fxgraph_cache_miss"], found["fxgraph_cache_hit"], found["fxgraph_cache_bypass"]]))
"""


def test_a_second_attempt_compiles_nothing_again(
    run_python: Callable[..., CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_folders, "PARENT", tmp_path)
    for variable in CACHES:  # torch sets them in a process that has compiled something
        monkeypatch.delenv(variable, raising=False)
    (first, before), (second, after) = (_attempt(run_python, tmp_path, number) for number in (1, 2))
    assert first[0] == second[1] > 0, (first, second)
    assert first[1:] == [0, 0]
    assert second[0] == second[2] == 0
    assert before == after != set()


def _attempt(
    run_python: Callable[..., CompletedProcess[str]], tmp_path: Path, number: int
) -> tuple[list[int], set[Path]]:
    """Misses, hits and bypasses of the cache in an attempt's rank, and the entries after it."""
    this: Attempt = begin(tmp_path / f"run-{number}", ProcessIdentity.of(1))
    environment = rank_environment(this, num_ranks=1, accelerator="cpu", extra={})
    done = run_python(COMPILES, json.dumps(environment))
    assert done.returncode == 0, done.stderr
    entries = set(node_folders.node_path("inductor").glob("*/fxgraph/*/*/*"))
    return json.loads(done.stdout.splitlines()[-1]), entries
