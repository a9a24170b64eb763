"""How benchmarks.publishing compares, without the uploads."""

from benchmarks.publishing import UPLOADS, Upload, table

ROUNDS = [
    {
        (client, upload): Upload(seconds * slower, cpu_seconds)
        for upload in UPLOADS
        for client, seconds, cpu_seconds in (("ours", 2.0, 3.0), ("s5cmd", 1.0, 4.0), ("boto3", 4.0, 2.0))
    }
    for slower in (1, 10, 2)
]


def test_ours_is_compared_with_the_faster_and_with_the_more_frugal_peer_of_the_same_round() -> None:
    rows = table(ROUNDS, ["ours", "s5cmd", "boto3"]).splitlines()
    assert rows[2] == "| one file of 1 GB | ours | 250 (50 - 500) | 0.50 | 3.00 (3.00 - 3.00) | 1.50 |"
    assert rows[3] == "| one file of 1 GB | s5cmd | 500 (100 - 1000) |  | 4.00 (4.00 - 4.00) |  |"


def test_a_client_that_is_not_installed_has_no_row() -> None:
    rows = table(ROUNDS, ["ours", "boto3"]).splitlines()
    assert len(rows) == 2 + 2 * len(UPLOADS)
    assert "| 2.00 | 3.00 (3.00 - 3.00) | 1.50 |" in rows[2]
