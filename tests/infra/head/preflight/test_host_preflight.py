"""Preflight on the head: how findings are reported, and the checks of the head itself."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from infra.head.preflight.checklist import CHECKS, Report
from infra.head.preflight.findings import Finding
from infra.head.preflight.host_preflight import require_agreement, require_fit, survey
from infra.head.preflight.launch_requirements import LaunchRequirements
from t5train.errors import HostUnreachable, PreflightError
from tests.support.simulated_nodes import ThisMachine

DENIES = "echo 'me@near: Permission denied (publickey).' >&2; exit 255"
REFUSES = "echo 'ssh: connect to host near port 22: Connection refused' >&2; exit 255"


class Replies:
    """A transport on which every host answers with the output of a shell script."""

    def __init__(self, script: str) -> None:
        self._script = script

    def command(self, host: str, argv: Sequence[str]) -> list[str]:  # noqa: ARG002 - the same for all
        return ["sh", "-c", self._script]


@pytest.fixture
def requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchRequirements:
    """Requirements of a run on one host, with pdsh on the head's PATH."""
    pdsh = tmp_path / "bin" / "pdsh"
    pdsh.parent.mkdir()
    pdsh.write_text("#!/bin/sh\necho 'rcmd modules: ssh,exec (default: ssh)'\n", "utf-8")
    pdsh.chmod(0o700)
    monkeypatch.setenv("PATH", f"{pdsh.parent}:/usr/bin:/bin")
    return LaunchRequirements(slots={"near": (0,)}, root=tmp_path / "root", accelerator="cpu")


def test_the_table_has_a_line_for_every_check_and_every_finding() -> None:
    found = [Finding("ninja", "node1: no ninja"), Finding("ninja", "node2: no"), Finding("clock", "late", False)]
    rows = Report(found, None, None, {"python": "3.11"}).rows()
    assert {check for check, _, _ in rows} == set(CHECKS)
    assert [row[1:] for row in rows if row[0] == "ninja"] == [["PROBLEM", "node1: no ninja"], ["PROBLEM", "node2: no"]]
    assert ["clock", "note", "late"] in rows
    assert ["python", "ok", "the same Python and kind of processor: 3.11"] in rows
    assert rows[-1] == ["all-reduce", "not tried", "fix the problems above first"]


def test_an_unreachable_host_raises_its_own_error(requirements: LaunchRequirements) -> None:
    with pytest.raises(HostUnreachable, match=r"near: connection refused\. Start sshd there"):
        require_fit(requirements, Replies(REFUSES))


def test_problems_are_raised_in_one_error_before_anything_is_created(requirements: LaunchRequirements) -> None:
    words = "preflight checks failed:\n  reachable: near: it rejects this user's SSH keys"
    with pytest.raises(PreflightError, match=words):
        require_agreement(requirements, Replies(DENIES))
    assert not list(requirements.root.iterdir())


def test_unreachable_hosts_are_returned_if_all_else_is_well(requirements: LaunchRequirements, tmp_path: Path) -> None:
    assert list(require_agreement(requirements, Replies(REFUSES))) == ["near"]
    (tmp_path / "bin" / "pdsh").write_text("#!/bin/sh\necho 'rcmd modules: exec,rsh'\n", "utf-8")
    with pytest.raises(PreflightError, match=r"launcher: pdsh .*\n  reachable: near: connection refused"):
        require_agreement(requirements, Replies(REFUSES))


def test_hosts_that_share_the_root_use_own_disks_if_told_to(requirements: LaunchRequirements, tmp_path: Path) -> None:
    told_to = replace(requirements, node_local=True, scratch=tmp_path / "scratch")
    assert not survey(requirements, ThisMachine()).is_node_local
    found = survey(told_to, ThisMachine())
    assert found.is_node_local
    (of_root,) = (one.text for one in found.findings if one.check == "root")
    assert of_root.startswith("storage.node_local is true. Files are staged to hosts, and checkpoints are gathered")
    assert (tmp_path / "scratch" / ".mark").exists()


def test_a_reply_of_other_code_or_of_a_login_shell_is_reported(requirements: LaunchRequirements) -> None:
    (found,) = survey(requirements, Replies("echo '{}'")).findings
    assert found.text.startswith("near runs another version of this package: '{}' is not a valid message")
    assert found.text.endswith("or have it sent with --ship-code")
    (found,) = survey(requirements, Replies("echo Welcome; echo '{}'")).findings
    assert re.match(r"near: got 'Welcome' .*\. Make the login shell there", found.text)


def test_a_host_that_cannot_store_the_code_is_asked_nothing_else(requirements: LaunchRequirements) -> None:
    found = survey(replace(requirements, code="c0de"), Replies("echo no room >&2; exit 1")).findings
    said = [(one.check, one.text.rpartition(". ")[2]) for one in found]
    assert said == [("program", "The command's last output: no room")]


@pytest.mark.parametrize(
    ("modules", "text"), [("exec,rsh", "no module for ssh"), (None, "pdsh is not installed on this machine")]
)
def test_the_head_must_have_pdsh_with_its_ssh_module(
    requirements: LaunchRequirements, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, modules: str | None, text: str
) -> None:
    pdsh = tmp_path / "bin" / "pdsh"
    if modules is None:
        pdsh.unlink()
        monkeypatch.setenv("PATH", str(pdsh.parent))
    else:
        pdsh.write_text(f"#!/bin/sh\necho 'rcmd modules: {modules}'\n", "utf-8")
    with pytest.raises(PreflightError, match=text):
        require_agreement(requirements, Replies("echo '{}'"))
