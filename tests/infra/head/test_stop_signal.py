"""A block that must not be interrupted is finished even if Ctrl-C is pressed again. Then Ctrl-C takes effect."""

import signal
import subprocess
import sys

import pytest

ENDING = """
import sys
from infra.head.stop_signal import undisturbed
try:
    with undisturbed("ending the ranks"):
        print("begun", flush=True)
        sys.stdin.read()
        print("done", flush=True)
    print("not reached", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(("number", "last"), [(signal.SIGINT, "interrupted\n"), (signal.SIGTERM, "")])
def test_a_signal_takes_effect_when_the_block_is_done(number: signal.Signals, last: str) -> None:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", ENDING], **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        for _ in range(2):
            process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)  # closes its stdin, which ends the block
    assert stdout.decode() == f"done\n{last}"
    assert stderr.decode().startswith("ending the ranks: please wait\n")
    assert process.returncode == (0 if last else -number)
