"""Processes in new namespaces: each holds a host, or the switch, for as long as it lives."""

import subprocess
from pathlib import Path
from typing import IO, cast

from infra.testcluster import registry
from t5train.errors import TestClusterError

HOST = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child")
SWITCH = ("--net",)
_CODE = str(Path(__file__).parents[2])


def start(
    cluster: str, kinds: tuple[str, ...], argv: list[str], wanted: bytes, console: Path
) -> subprocess.Popen[bytes]:
    """Start a program that reads ``wanted`` and prints a line once it is ready; ``await_ready`` is to follow."""
    state = registry.read(cluster)
    prefix = ["setpriv", "--pdeathsig", "KILL"] if state.temporary else []
    with open(console, "wb") as errors:
        process = subprocess.Popen(
            [*prefix, "unshare", *kinds, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=state.environment | registry.mark(cluster) | {"PYTHONPATH": _CODE},
            start_new_session=True,  # a terminal's Ctrl-C is not for hosts
        )
    with cast(IO[bytes], process.stdin) as stdin:
        stdin.write(wanted)
    return process


def await_ready(process: subprocess.Popen[bytes], console: Path) -> None:
    """Wait for the line. Raises TestClusterError with what the program said on its console if there is none."""
    with cast(IO[bytes], process.stdout) as output:
        if output.readline():
            return
    said = console.read_text("utf-8", "replace")[-2000:]
    raise TestClusterError(f"{console.parent.name} did not start: {said or 'it said nothing'}")
