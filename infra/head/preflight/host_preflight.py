"""Asks all hosts for their facts at once, judges them, and gives a table or an error."""

import json
import logging
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from infra.head.hosts.code_shipping import ship
from infra.head.hosts.node_client import node_command
from infra.head.hosts.ssh import Answer, Reply, Transport, run_everywhere
from infra.head.preflight.all_reduce_check import all_reduce
from infra.head.preflight.checklist import (
    ALL_REDUCE,
    CHECKS,
    IN_USE,
    LAUNCHER,
    PORT,
    REACHABLE,
    Judgement,
    judge,
    of_error,
)
from infra.head.preflight.findings import Finding, HostReply
from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.head.preflight.rendezvous import Meeting
from infra.node.inspection.facts import Facts, Question, Software
from infra.node.inspection.software import software
from infra.node.processes import identity
from t5train.errors import HostError, HostUnreachable, PreflightError, RemoteFailed
from t5train.files.atomic import write_text

_DEADLINE_SECONDS = 60.0  # importing torch from a slow disk, where accelerators are asked for
_STARTERS = {"pdsh": "pdsh", "slurm": "srun", "openmpi": "mpirun"}


def survey(needs: LaunchRequirements, transport: Transport) -> Judgement:
    """Ask every host, and judge what those say that answer; StorageError if the root cannot be written here.

    Hosts that are to be sent their code are sent it first.
    """
    asked_at: dict[str, float] = {}
    replies: dict[str, HostReply] = {}
    lacking = ship(transport, needs.slots) if needs.code else {}
    findings = [*_launcher(needs.launcher), *map(of_error, lacking.values())]
    with _nonce(needs.root) as (nonce, path):

        def question(host: str) -> bytes:
            asked_at[host] = time.time()  # just after ssh was started: what the node does begins later
            return json.dumps(asdict(_question(needs, host, path))).encode() + b"\n"

        def on_answer(host: str, reply: Reply) -> None:
            if isinstance(reply, HostError):
                findings.append(of_error(reply))
            else:
                try:
                    replies[host] = HostReply(_facts(reply), asked_at[host], time.time())
                except RemoteFailed as error:
                    findings.append(of_error(error))

        run_everywhere(
            transport,
            [host for host in needs.slots if host not in lacking],
            node_command("facts", needs.code),
            stdin_of=question,
            deadline_seconds=_DEADLINE_SECONDS,
            on_answer=on_answer,
        )
    in_order = {host: replies[host] for host in needs.slots if host in replies}
    judged = judge(in_order, needs, _own(needs), nonce, identity())
    return replace(judged, findings=[*findings, *judged.findings])


def _own(needs: LaunchRequirements) -> Software:
    """The head's software. While it runs others may have changed its code on disk, of which it has sent what it is."""
    found = software(dict(needs.spec))
    return found if needs.code is None else replace(found, code_digest=needs.code)


def _question(needs: LaunchRequirements, host: str, nonce_path: Path) -> Question:
    is_first = host == needs.first
    return Question(
        root=str(needs.root),
        nonce_path=str(nonce_path),
        scratch=str(needs.scratch) if needs.scratch else None,
        head=identity(),
        run_on_nodes=needs.run_on_nodes,
        accelerator=needs.accelerator,
        slots=list(needs.slots[host]),
        environment=dict(needs.environment),
        spec=dict(needs.spec),
        master_address=needs.master_address if is_first else None,
        wants_port=is_first,
        master_port=needs.master_port if is_first else None,
    )


def _facts(answer: Answer) -> Facts:
    try:
        return Facts.from_json(answer.message())
    except (KeyError, TypeError):  # other code there has other facts to tell
        raise RemoteFailed(
            f"{answer.host}: its answer is of another version of this package: install the head's there, or have it "
            "sent with --ship-code",
            [answer.host],
        ) from None


@contextmanager
def _nonce(root: Path) -> Iterator[tuple[str, Path]]:
    """A file under the root that no other host can have by chance."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    nonce = secrets.token_hex(16)
    path = root / f".preflight-{nonce[:8]}"
    write_text(path, nonce)
    try:
        yield nonce, path
    finally:
        path.unlink(missing_ok=True)


def _launcher(name: str) -> Iterator[Finding]:
    """Whether the head has the program that starts processes on hosts; pdsh must know ssh."""
    program = _STARTERS[name]
    if shutil.which(program) is None:
        yield Finding(LAUNCHER, f"{program} is not on this machine: install it, or choose another --launcher")
    elif name == "pdsh" and not _pdsh_knows_ssh():
        yield Finding(LAUNCHER, "pdsh on this machine has no module for ssh: install pdsh with pdsh-rcmd-ssh")


def _pdsh_knows_ssh() -> bool:
    said = subprocess.run(["pdsh", "-V"], capture_output=True, check=False, timeout=10)
    modules = [line for line in (said.stdout + said.stderr).splitlines() if line.startswith(b"rcmd modules:")]
    return any(b"ssh" in line for line in modules)


_log = logging.getLogger(__name__)
COLUMNS = ["check", "result", "what"]


@dataclass(frozen=True)
class Report:
    """What was found; where there is no problem, the ranks can meet."""

    judged: Judgement
    of_all_reduce: list[Finding]
    has_met: bool
    """Whether the all-reduce was tried: not where there were problems before it."""

    @property
    def findings(self) -> list[Finding]:
        """Of the facts, and of the all-reduce."""
        return [*self.judged.findings, *self.of_all_reduce]

    @property
    def problems(self) -> list[Finding]:
        """What keeps the hosts from training together."""
        return [finding for finding in self.findings if finding.is_problem]

    def rows(self) -> list[list[str]]:
        """Of a table with ``COLUMNS``: each finding, and a line for each check without one."""
        rows = []
        for check, holds in CHECKS.items():
            seen = self.judged.seen.get(check)
            found = [finding for finding in self.findings if finding.check == check]
            if check == ALL_REDUCE and not self.has_met:
                rows.append([check, "not tried", "the problems above come first"])
            elif not found:
                rows.append([check, "ok", f"{holds}: {seen}" if seen else holds])
            rows += [[check, "PROBLEM" if finding.is_problem else "note", finding.text] for finding in found]
        return rows


def preflight(needs: LaunchRequirements, transport: Transport) -> Report:
    """Ask all hosts, and where these have no problem let all ranks meet."""
    judged = survey(needs, transport)
    if judged.meeting is None or judged.port is None or any(one.is_problem for one in judged.findings):
        return Report(judged, [], has_met=False)
    met = [Finding(ALL_REDUCE, text) for text in all_reduce(needs, transport, judged.meeting, judged.port)]
    return Report(judged, met, has_met=True)


def require_agreement(needs: LaunchRequirements, transport: Transport) -> dict[str, str]:
    """PreflightError with every problem that can be known before the ranks' turn comes, in a second.

    An attempt of this very run that is still going on is none: it holds accelerators and the port. Where the only
    problem is that hosts do not answer, and that can pass, these are returned, with what there is to say of each.
    """
    found = survey(needs, transport).findings
    problems = [one for one in found if one.is_problem and one.check not in {IN_USE, PORT}]
    if not all(problem.can_pass for problem in problems):
        _require_none(problems)
    return {host: problem.text for problem in problems for host in problem.hosts}


@dataclass(frozen=True)
class Fit:
    """What ranks of hosts that can train together are to know."""

    meeting: Meeting
    port: int
    is_node_local: bool


def require_fit(needs: LaunchRequirements, transport: Transport) -> Fit:
    """Where the ranks can meet, and did, and what they share.

    Raises PreflightError with every problem, and HostUnreachable if that is the only one.
    """
    report = preflight(needs, transport)
    if report.problems and all(problem.check == REACHABLE for problem in report.problems):
        silent = [host for problem in report.problems for host in problem.hosts]
        raise HostUnreachable("; ".join(problem.text for problem in report.problems), silent)  # which can pass
    _require_none(report.problems)
    for remark in report.findings:
        _log.warning("%s: %s", remark.check, remark.text)
    meeting, port = report.judged.meeting, report.judged.port
    assert meeting is not None  # noqa: S101 - else there is a problem
    assert port is not None  # noqa: S101 - as above
    return Fit(meeting, port, report.judged.is_node_local)


def _require_none(problems: list[Finding]) -> None:
    if problems:
        lines = "".join(f"\n  {problem.check}: {problem.text}" for problem in problems)
        raise PreflightError(f"preflight checks failed:{lines}")
