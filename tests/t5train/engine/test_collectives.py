"""Values that ranks exchange."""

import os
import subprocess
import sys

import pytest

from infra.node.ports import free_port

RANK = """
import deepspeed
from torch.distributed import distributed_c10d

from t5train.engine.collectives import gather_objects; from t5train.engine.collectives import rank

deepspeed.init_distributed("gloo", verbose=False)
del distributed_c10d._unpickler  # with which torch reads what other ranks have sent
print(gather_objects({f"é{rank()}" * 100 * rank(): [rank(), 2.5, None]}) == [
    {"": [0, 2.5, None]}, {"é1" * 100: [1, 2.5, None]}
])
"""


@pytest.mark.slow
def test_objects_gathered_from_other_ranks_are_exact_and_never_unpickled() -> None:
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "DS_ACCELERATOR": "cpu",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=os.environ | rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert [each.communicate(timeout=300)[0].splitlines()[-1:] for each in ranks] == [["True"], ["True"]]
    finally:
        for each in ranks:
            each.kill()
