import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from infra.node.attempts.attempt import Attempt
from infra.node.attempts.rank_environment import rank_environment, redact, travelling_environment, variables_of_rank
from infra.node.node_folders import node_path
from t5train.errors import LaunchError

KEYS = [
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "GITHUB_TOKEN"),
    *("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING", "PYTHON_KEYRING_PASSWORD"),
    *("PREFECT_SERVER_DATABASE_CONNECTION_URL", "NCCL_SECRET"),
]
SECRETS = dict.fromkeys(KEYS, "s3cret")
SECRETS |= dict.fromkeys(("PREFECT_API_URL", "HTTPS_PROXY"), "http://user:s3cret@host")


def environment(this: Attempt, num_ranks: int = 1, accelerator: str | None = None, **parent: str) -> dict[str, str]:
    return rank_environment(this, num_ranks=num_ranks, accelerator=accelerator, extra={}, parent=parent)


def test_no_secret_of_the_parent_reaches_a_rank(this: Attempt) -> None:
    assert "s3cret" not in " ".join(environment(this, **SECRETS).values())


def test_redact_removes_passwords_in_urls_and_values_of_variables_with_secret_names() -> None:
    text = "hidden-one hidden-two http://me:hidden-three@host hidden-four"
    secret = {"HF_TOKEN": "hidden-one", "db_password": "hidden-two", "PREFECT_API_AUTH_STRING": "hidden-four"}
    assert "hidden" not in redact(text, secret)


def test_variables_that_a_rank_needs_are_passed_on_and_those_of_another_launcher_are_not(this: Attempt) -> None:
    needed = {
        "HOME": "/h", "LANG": "C.UTF-8", "LC_ALL": "C", "LD_LIBRARY_PATH": "/l", "PYTHONPATH": "/p", "CUDA_HOME": "/c",
        "NCCL_DEBUG": "INFO", "TORCH_EXTENSIONS_DIR": "/t", "XDG_CACHE_HOME": "/x", "TMPDIR": "/m",
    }  # fmt: skip
    launchers = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"]
    seen = environment(this, **needed, **dict.fromkeys(launchers, "1"))
    assert seen.items() >= needed.items()
    assert not seen.keys() & set(launchers)


def test_ranks_read_what_was_downloaded_before_unless_the_user_lets_them_ask_the_hub(this: Attempt) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    assert environment(this).items() >= offline.items()
    assert travelling_environment(this, accelerator=None, names=[], parent={}).items() >= offline.items()
    assert environment(this, HF_DATASETS_OFFLINE="0").items() >= {**offline, "HF_DATASETS_OFFLINE": "0"}.items()
    asking = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    assert travelling_environment(this, accelerator=None, names=[], parent=asking).items() >= asking.items()


CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


@pytest.mark.parametrize(("variable", "folder"), [*CACHES.items(), ("TORCH_EXTENSIONS_DIR", "operators")])
def test_what_is_generated_is_kept_in_the_node_folder_unless_the_user_chose_another(
    this: Attempt, variable: str, folder: str
) -> None:
    found = environment(this, HOME="/h")[variable]
    assert Path(found).parent == node_path(folder)
    assert environment(this, HOME="/other")[variable] == found
    assert environment(this, **{variable: "/chosen"})[variable] == "/chosen"


def test_hosts_keep_what_is_generated_in_their_own_folders(this: Attempt) -> None:
    """Those of the head need not exist there, or may be on a disk that another machine compiles for."""
    head = {**dict.fromkeys(CACHES, "/of-the-head"), "TRITON_PRINT_AUTOTUNING": "1"}
    seen = travelling_environment(this, accelerator=None, names=[], parent=head)
    assert not set(CACHES) & set(seen)
    assert seen["TRITON_PRINT_AUTOTUNING"] == "1"
    on_host = replace(this, head=None, lease_seconds=10.0)
    (this.folder / "environment.json").write_text(json.dumps(seen))
    found = variables_of_rank(on_host, {"RANK": "0", "TRITON_CACHE_DIR": "/of-the-host"})
    assert found["TRITON_CACHE_DIR"] == "/of-the-host"
    assert Path(found["TORCHINDUCTOR_CACHE_DIR"]).parent == node_path("inductor")


def test_ranks_read_utf8_in_any_locale(this: Attempt) -> None:
    argv = [sys.executable, "-c", "open('/proc/self/status').encoding.lower() == 'utf-8' or exit(1)"]
    subprocess.run(argv, env=environment(this, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"), check=True)


def test_cores_are_divided_among_the_ranks(this: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(10)))
    assert environment(this, num_ranks=4)["OMP_NUM_THREADS"] == "2"
    assert environment(this, num_ranks=16)["OMP_NUM_THREADS"] == "1"
    assert environment(this, num_ranks=4, OMP_NUM_THREADS="7")["OMP_NUM_THREADS"] == "7"


def test_programs_of_the_python_environment_are_found_even_if_it_is_not_activated(this: Attempt) -> None:
    first, *rest = environment(this, PATH="/usr/bin:/bin")["PATH"].split(":")
    assert os.path.samefile(first, os.path.dirname(sys.executable))  # noqa: PTH120, PTH121 - plain text from PATH
    assert rest == ["/usr/bin", "/bin"]


@pytest.mark.parametrize("devices", ["3,5", ""])
def test_visible_devices_are_passed_in_a_variable_that_launchers_do_not_overwrite(this: Attempt, devices: str) -> None:
    seen = environment(this, CUDA_VISIBLE_DEVICES=devices)
    assert "CUDA_VISIBLE_DEVICES" not in seen
    assert seen["T5_VISIBLE_DEVICES"] == devices


def test_the_accelerator_is_the_specs_or_else_left_to_deepspeed(this: Attempt) -> None:
    assert environment(this, accelerator="cpu", DS_ACCELERATOR="cuda")["DS_ACCELERATOR"] == "cpu"
    assert "DS_ACCELERATOR" not in environment(this)


def test_modules_in_the_current_folder_do_not_shadow_those_of_a_guard(this: Attempt) -> None:
    (this.folder / "infra.py").write_text("raise SystemExit('shadowed')")
    argv = [sys.executable, "-m", "infra.node.attempts.process_guard", str(this.folder), sys.executable, "-c", "pass"]
    subprocess.run(argv, cwd=this.folder, env={**environment(this, **os.environ), "RANK": "0"}, check=True)


def test_hosts_get_settings_and_requested_variables_of_the_head_and_no_others(this: Attempt) -> None:
    head = SECRETS | {
        "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "7", "CUDA_HOME": "/c", "HOME": "/h",
        "PATH": "/p", "LD_LIBRARY_PATH": "/l", "TMPDIR": "/t", "RANK": "5", "STRAY": "1", "MY_MODE": "offline",
    }  # fmt: skip
    names = ["MY_MODE", "HF_TOKEN", "ABSENT"]
    seen = travelling_environment(this, accelerator="cpu", names=names, parent=head)
    expected = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "MY_MODE": "offline", "HF_TOKEN": "s3cret"}
    assert seen.items() >= {**expected, "DS_ACCELERATOR": "cpu", "T5_RUN_ID": this.run_id}.items()
    assert [name for name, value in seen.items() if value == "s3cret"] == ["HF_TOKEN"]
    assert not seen.keys() & (head.keys() - expected.keys())


@pytest.mark.parametrize("names", [("RANK", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_LOCALID"),
                                   ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")])  # fmt: skip
def test_the_rank_is_read_from_the_variables_of_each_launcher(this: Attempt, names: tuple[str, str]) -> None:
    seen = variables_of_rank(this, {names[0]: "13", names[1]: "5"})
    assert (seen["RANK"], seen["LOCAL_RANK"]) == ("13", "5")


def test_deepspeeds_rank_takes_precedence_and_a_missing_one_is_an_error_that_names_the_variables(this: Attempt) -> None:
    assert variables_of_rank(this, {"RANK": "2", "SLURM_PROCID": "0"})["RANK"] == "2"
    with pytest.raises(LaunchError, match="neither RANK nor SLURM_PROCID nor OMPI_COMM_WORLD_RANK"):
        variables_of_rank(this, {})
