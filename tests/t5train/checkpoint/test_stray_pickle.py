"""A checkpoint with a pickle that no rank recorded is refused, because DeepSpeed would run the pickle's code."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.node.attempts import shared_memory
from infra.node.ports import free_port
from t5train.checkpoint import tags
from t5train.errors import UnlistedFile

pytestmark = pytest.mark.slow

STRAY = "mp_rank_000_model_states.pt"  # sorts before DeepSpeed's own mp_rank_00_model_states.pt
LOAD_A_TAG_WITH_A_STRAY_FILE = """
import contextlib
import os
import sys
from pathlib import Path

folder, stray, port = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
os.environ |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}

import deepspeed
import torch

class Hostile:
    def __reduce__(self):
        return Path.touch, (folder / "the-code-ran",)

model = torch.nn.Linear(4, 4)
settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
settings["zero_allow_untested_optimizer"] = True
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings)
engine.save_checkpoint(str(folder), tag="tag")
torch.save({"module": Hostile()}, folder / "tag" / stray)
with contextlib.suppress(Exception):
    engine.load_checkpoint(str(folder), tag="tag")
"""


def test_deepspeed_unpickles_a_stray_file_and_a_tag_that_holds_one_is_refused(
    run_python: Callable[..., subprocess.CompletedProcess[str]], record_only_rank: Callable[..., None], tmp_path: Path
) -> None:
    port = free_port()
    ended = run_python(LOAD_A_TAG_WITH_A_STRAY_FILE, str(tmp_path), STRAY, str(port))
    shared_memory.remove_all("127.0.0.1", port)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "the-code-ran").exists(), "DeepSpeed no longer loads a stray file"
    tag = tmp_path / "tag"
    own = [path.name for path in tag.iterdir() if path.name != STRAY]
    record_only_rank(tag, own, [], zero_stage=1)
    with pytest.raises(UnlistedFile, match=f"holds {STRAY}, a file that no rank recorded"):
        tags.require_complete(tag)
    (tag / STRAY).unlink()
    tags.require_complete(tag)
