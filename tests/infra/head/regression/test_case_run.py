"""How the steps of a run become one number."""

import random
import subprocess
import sys
import time

from infra.head.regression.case_run import cpu_seconds, quartile


def test_a_quarter_of_slow_steps_and_slow_first_steps_change_no_quartile() -> None:
    steps = [0.05] * 60
    disturbed = [2.0] * 5 + [0.05 if number % 2 else 0.4 for number in range(55)]
    assert quartile(disturbed) == quartile(steps) == 0.05


def test_the_quartile_of_steps_is_their_lower_one() -> None:
    steps = [float(number) for number in range(100)]
    random.Random(0).shuffle(steps)
    assert quartile([0.0] * 5 + steps) == 25.0


def test_cpu_time_includes_processes_that_have_ended() -> None:
    before_others, before = cpu_seconds(), time.process_time()
    subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
    assert cpu_seconds() - before_others > time.process_time() - before
