"""Ranks of one machine listen only where other machines cannot reach them."""

import os
import subprocess
import sys

import pytest

from infra.node.ports import free_port

# Prints the addresses at which this process listens, as the kernel lists them.
PROGRAM = """
import os
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from t5train.train.loopback_store import listen_on_loopback

store = listen_on_loopback()
assert (store is None) == (os.environ["RANK"] != "0")
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2
own = set()
for path in Path("/proc/self/fd").iterdir():
    with suppress(FileNotFoundError):  # of the listing itself
        own.add(os.readlink(path))
lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
print(*(each[1] for each in lines if each[3] == "0A" and f"socket:[{each[9]}]" in own), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
LOOPBACK = "0100007F"


@pytest.mark.slow
def test_ranks_of_one_machine_listen_only_on_loopback() -> None:
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=common | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert len(outputs[0]) >= 1
    assert all(address.startswith(f"{LOOPBACK}:") for addresses in outputs for address in addresses), outputs
