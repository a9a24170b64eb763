import os
from pathlib import Path

import pytest

from infra.node import node_folders
from infra.node.attempts import head_lease
from t5train.errors import StorageError

pytestmark = pytest.mark.usefixtures("own_node_folder")


def test_the_attempts_folder_is_private_and_an_attempt_keeps_its_path() -> None:
    folder = node_folders.attempt_folder("smoke-0001-0123abcd")
    assert folder.parent.stat().st_mode & 0o077 == 0
    assert folder.parent.parent.name == f"t5-pretrain-{os.getuid()}"
    assert node_folders.attempt_folder("smoke-0001-0123abcd") == folder


@pytest.mark.parametrize("run_id", ["", "../other", "a/b", ".hidden", "a b", "$(id)", "-o", "x" * 200])
def test_an_invalid_attempt_id_is_rejected(run_id: str) -> None:
    with pytest.raises(StorageError, match="is not a valid attempt id"):
        node_folders.attempt_folder(run_id)


def test_a_node_folder_that_others_can_access_or_that_is_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"t5-pretrain-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"\. Move .* to another place"):
        node_folders.locks_folder()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (tmp_path / f"t5-pretrain-{os.getuid()}").unlink()
    (tmp_path / f"t5-pretrain-{os.getuid()}").mkdir()
    (tmp_path / f"t5-pretrain-{os.getuid()}").chmod(0o777)
    with pytest.raises(StorageError, match="drwxrwxrwx"):
        node_folders.node_folder()


def test_a_leases_age_counts_from_its_renewal_and_is_infinite_without_a_valid_one(tmp_path: Path) -> None:
    head_lease.renew(tmp_path)  # a late renewal does not bring back a lease that was removed
    assert head_lease.age_seconds(tmp_path) == float("inf")
    head_lease.begin(tmp_path)
    for _ in range(50):  # however the clock is rounded
        head_lease.renew(tmp_path)
        assert 0 <= head_lease.age_seconds(tmp_path) < 5
    (tmp_path / head_lease.LEASE).write_text("1e18")  # a time from before a reboot
    assert head_lease.age_seconds(tmp_path) == float("inf")
