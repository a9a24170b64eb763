"""What W&B needs is looked for before anything starts, and the API key goes only where it has to."""

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from infra.head.hosts.hostfile import Hosts
from infra.head.launch.held_run import HeldRun, hold_run
from infra.head.preflight import monitor_checks
from infra.head.preflight.monitor_checks import require_wandb, wandb_environment
from infra.head.training_run import launch_spec, require_startable
from t5train.errors import SpecError
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe

KEY = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def _logged_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_checks, "find_spec", lambda _: object())


def spec_with(root: Path, **monitor: Any) -> RunSpec:
    settings = {f"monitor.{name}": value for name, value in {"wandb": True, **monitor}.items()}
    return recipe("smoke", {"storage.root": str(root), "cluster.accelerator": "cpu", **settings})


def test_a_run_without_wandb_needs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_checks, "find_spec", lambda _: None)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    require_wandb(spec_with(tmp_path, wandb=False))
    assert not wandb_environment(spec_with(tmp_path, wandb=False))
    assert not wandb_environment(spec_with(tmp_path, wandb_mode="offline"))


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_missing_package_is_refused_before_anything_starts_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(monitor_checks, "find_spec", lambda _: None)
    with pytest.raises(SpecError, match=r"wandb is not installed. Install it: .* -m pip install 'wandb>=0\.31,<0\.32'"):
        require_startable(spec_with(tmp_path, wandb_mode=mode))
    assert not list(tmp_path.iterdir())


def test_online_without_a_login_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no API key for api.wandb.ai. Set WANDB_API_KEY, .*wandb_mode=offline"):
        require_startable(spec_with(tmp_path))
    require_wandb(spec_with(tmp_path, wandb_mode="offline"))


@pytest.mark.parametrize("how", ["variable", "netrc"])
def test_online_with_a_login_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "variable":
        monkeypatch.setenv("WANDB_API_KEY", KEY)
    else:
        (tmp_path / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
        (tmp_path / ".netrc").chmod(0o600)
    require_wandb(spec_with(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    if how == "netrc":
        with pytest.raises(SpecError, match=r"no API key for wandb\.example\.org"):
            require_wandb(spec_with(tmp_path))


def test_a_finished_run_needs_no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_checks, "has_finished", lambda _: True)
    require_wandb(spec_with(tmp_path))


def test_on_hosts_the_key_has_to_be_passed_on_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_hosts = spec_with(tmp_path).with_settings({"cluster.hostfile": "hosts"})
    passed_on = on_hosts.with_settings({"cluster.environment": ["WANDB_API_KEY"]})
    with pytest.raises(SpecError, match=r"Set WANDB_API_KEY here and pass it on with cluster.environment"):
        require_wandb(passed_on)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    require_wandb(passed_on)
    with pytest.raises(SpecError, match="the host of rank 0 would get no API key"):
        require_wandb(on_hosts)


@pytest.mark.parametrize("are_running", [False, True])
def test_a_head_that_returns_to_running_ranks_needs_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_running: bool
) -> None:
    monkeypatch.setattr(HeldRun, "running_hosts", Hosts.of({"node0": [0]}) if are_running else None)
    spec = spec_with(tmp_path, csv=True).with_settings({"cluster.hostfile": "hosts"})
    expected = nullcontext() if are_running else pytest.raises(SpecError, match="would get no API key")
    with hold_run(spec.run_folder) as run, expected:
        require_startable(spec, run)


def test_the_key_reaches_ranks_in_their_environment_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    spec = spec_with(tmp_path)
    launch = launch_spec(spec, lambda *_: None)
    assert launch.environment["WANDB_API_KEY"] == KEY
    assert KEY not in spec.model_dump_json()
    assert KEY not in repr(launch)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="the package wandb is not installed")
def test_the_installed_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_checks, "find_spec", importlib.util.find_spec)
    require_wandb(spec_with(tmp_path, wandb_mode="offline"))
