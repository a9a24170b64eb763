"""A block that must not be interrupted is finished even if Ctrl-C is pressed again. Then Ctrl-C takes effect."""

import signal
import subprocess
import sys

import pytest

from infra.head.stop_signal import is_stop

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


HANDLING = """
import signal, time
from infra.head.stop_signal import SAME_STOP_SECONDS, is_stop, stoppable
try:
    with stoppable():
        try:
            signal.raise_signal(signal.{first})
        except BaseException as error:
            print(is_stop(error))
            if {first!r} == "SIGINT":
                signal.raise_signal(signal.SIGINT)  # still the first one
            print("saving")
            time.sleep(SAME_STOP_SECONDS)
            signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt as error:
    print(is_stop(error))
"""


@pytest.mark.parametrize("first", ["SIGTERM", "SIGINT"])
def test_ranks_save_after_the_first_signal_and_not_after_the_second(first: str) -> None:
    program = [sys.executable, "-c", HANDLING.format(first=first)]
    found = subprocess.run(program, capture_output=True, text=True, check=False)
    assert found.stdout == "True\nsaving\nFalse\n", found.stderr
    assert not is_stop(ValueError())
