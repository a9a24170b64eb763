from benchmarks import preflight


def test_a_survey_of_simulated_hosts_finds_no_faults() -> None:
    number, seconds, work = preflight.surveyed(3, latency_seconds=0.0, rounds=1)
    assert number == 3
    assert 0 < work < seconds


def test_a_launch_of_1024_ranks_is_planned() -> None:
    number, *_ = preflight.planned(128, rounds=1)
    assert number * preflight.SLOTS == 1024
