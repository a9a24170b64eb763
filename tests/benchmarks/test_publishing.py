"""How benchmarks.publishing compares, without the uploads."""

from benchmarks.measured_result import Spread
from benchmarks.publishing import UPLOADS, Upload, rows

ROUNDS = [
    {
        (client, upload): Upload(seconds * slower, cpu_seconds)
        for upload in UPLOADS
        for client, seconds, cpu_seconds in (("ours", 2.0, 3.0), ("s5cmd", 1.0, 4.0), ("boto3", 4.0, 2.0))
    }
    for slower in (1, 10, 2)
]


def test_ours_is_compared_with_the_faster_and_with_the_more_frugal_peer_of_the_same_round() -> None:
    ours, s5cmd, *_ = rows(ROUNDS, ["ours", "s5cmd", "boto3"])
    assert (ours["upload"], ours["client"]) == ("one file of 1 GB", "ours")
    assert ours["MB/s"] == Spread(median=250, min=50, max=500)
    assert (ours["client CPU, s/GB"], s5cmd["client CPU, s/GB"]) == (3, 4)
    assert ours["MB/s, of the faster peer"] == 0.5
    assert ours["CPU, of the more frugal peer"] == 1.5
    assert "MB/s, of the faster peer" not in s5cmd


def test_a_client_that_is_not_installed_has_no_row() -> None:
    found = rows(ROUNDS, ["ours", "boto3"])
    assert len(found) == 2 * len(UPLOADS)
    assert found[0]["MB/s, of the faster peer"] == 2.0
