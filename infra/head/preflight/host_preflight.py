"""Collects the facts of all hosts at once, evaluates them, and returns a table or raises an error."""

import logging
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from infra.head.hosts.code_shipping import ship
from infra.head.hosts.nodes import Nodes
from infra.head.hosts.ssh import Transport
from infra.head.preflight.all_reduce_check import all_reduce
from infra.head.preflight.checklist import (
    ALL_REDUCE,
    IN_USE,
    LAUNCHER,
    PORT,
    REACHABLE,
    Report,
    judge,
    of_error,
)
from infra.head.preflight.findings import Finding, HostReply
from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.head.preflight.rendezvous import Rendezvous
from infra.node.inspection.facts import Facts, Question, Software
from infra.node.inspection.software import software
from infra.node.processes import identity
from t5train.errors import HostError, HostUnreachable, PreflightError
from t5train.files.atomic import write_text

_DEADLINE_SECONDS = 60.0  # enough to import torch from a slow disk, if accelerators are inspected
_STARTERS = {"pdsh": "pdsh", "slurm": "srun", "openmpi": "mpirun"}


def survey(requirements: LaunchRequirements, transport: Transport) -> Report:
    """Query every host, and evaluate the answers. Raises StorageError if the head cannot write to the root.

    If the code is to be shipped to the hosts, this is done first.
    """
    asked_at: dict[str, float] = {}
    replies: dict[str, HostReply] = {}
    lacking = ship(transport, requirements.slots, requirements.python) if requirements.code else {}
    findings = [*_launcher(requirements.launcher), *map(of_error, lacking.values())]
    with _nonce(requirements.root, is_written=not requirements.node_local) as (nonce, path):

        def on_start(host: str) -> None:
            asked_at[host] = time.time()  # just after ssh was started: the node's work begins later

        def on_answer(host: str, answer: Facts | HostError) -> None:
            if isinstance(answer, HostError):
                findings.append(of_error(answer))
            else:
                replies[host] = HostReply(answer, asked_at[host], time.time())

        questions = {host: _question(requirements, host, path) for host in requirements.slots if host not in lacking}
        nodes = Nodes(transport, tuple(questions), code=requirements.code, python=requirements.python)
        nodes.ask_each(questions, _DEADLINE_SECONDS, on_start, on_answer)
    in_order = {host: replies[host] for host in requirements.slots if host in replies}
    judged = judge(in_order, requirements, _own(requirements), nonce, identity())
    return replace(judged, findings=[*findings, *judged.findings])


def _own(requirements: LaunchRequirements) -> Software:
    """The head's software. If code was shipped, its digest is used: the code on disk may have changed since."""
    found = software(requirements.spec)
    return found if requirements.code is None else replace(found, code_digest=requirements.code)


def _question(requirements: LaunchRequirements, host: str, nonce_path: Path) -> Question:
    is_first = host == requirements.first
    return Question(
        root=requirements.root,
        nonce_path=nonce_path,
        scratch=requirements.scratch,
        head=identity(),
        run_on_nodes=requirements.run_on_nodes,
        accelerator=requirements.accelerator,
        slots=requirements.slots[host],
        environment=requirements.environment,
        spec=requirements.spec,
        master_address=requirements.master_address if is_first else None,
        wants_port=is_first,
        master_port=requirements.master_port if is_first else None,
    )


@contextmanager
def _nonce(root: Path, *, is_written: bool) -> Iterator[tuple[str, Path]]:
    """Yield the text and path of a probe file under the root. The text is random, so no other file has it.

    If the file ``is_written`` not, no host can read it, as if none shared the root.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    nonce = secrets.token_hex(16)
    path = root / f".preflight-{nonce[:8]}"
    if is_written:
        write_text(path, nonce)
    try:
        yield nonce, path
    finally:
        path.unlink(missing_ok=True)


def _launcher(name: str) -> Iterator[Finding]:
    """Check that the head has the program that starts processes on hosts, and pdsh its ssh module."""
    program = _STARTERS[name]
    if shutil.which(program) is None:
        yield Finding(LAUNCHER, f"{program} is not installed on this machine. Install it, or choose another --launcher")
    elif name == "pdsh" and not _pdsh_knows_ssh():
        yield Finding(LAUNCHER, "pdsh on this machine has no module for ssh. Install pdsh with pdsh-rcmd-ssh")


def _pdsh_knows_ssh() -> bool:
    said = subprocess.run(["pdsh", "-V"], capture_output=True, check=False, timeout=10)
    modules = [line for line in (said.stdout + said.stderr).splitlines() if line.startswith(b"rcmd modules:")]
    return any(b"ssh" in line for line in modules)


_log = logging.getLogger(__name__)


def preflight(requirements: LaunchRequirements, transport: Transport) -> Report:
    """Query all hosts; if there are no problems, run the all-reduce over all ranks."""
    found = survey(requirements, transport)
    if found.rendezvous is None or found.port is None or found.problems:
        return found
    met = [Finding(ALL_REDUCE, text) for text in all_reduce(requirements, transport, found.rendezvous, found.port)]
    return replace(found, findings=[*found.findings, *met], all_reduce_tried=True)


def require_agreement(requirements: LaunchRequirements, transport: Transport) -> dict[str, str]:
    """Raise PreflightError with every problem that can be found within a second, without starting ranks.

    Accelerators and a port in use are not problems here: an attempt of this run that is still running uses them. If the
    only problem is that hosts do not answer, and this may be transient, returns these hosts with their messages.
    """
    found = survey(requirements, transport).problems
    problems = [one for one in found if one.check not in {IN_USE, PORT}]
    if not all(problem.is_transient for problem in problems):
        raise _error(problems)
    return {host: problem.text for problem in problems for host in problem.hosts}


@dataclass(frozen=True)
class Fit:
    """The rendezvous of hosts that can train together, and whether they use node-local storage."""

    rendezvous: Rendezvous
    port: int
    is_node_local: bool


def require_fit(requirements: LaunchRequirements, transport: Transport) -> Fit:
    """Check that the hosts can train together, including an all-reduce at the rendezvous that is returned.

    Raises PreflightError with every problem, or HostUnreachable if the only problem is that hosts cannot be reached.
    """
    report = preflight(requirements, transport)
    if report.problems and all(problem.check == REACHABLE for problem in report.problems):
        silent = [host for problem in report.problems for host in problem.hosts]
        raise HostUnreachable("; ".join(problem.text for problem in report.problems), silent)  # may be transient
    rendezvous, port = report.rendezvous, report.port
    if report.problems:
        raise _error(report.problems)
    if rendezvous is None or port is None:
        raise PreflightError(
            "no address and port were found at which all ranks can meet. Set cluster.master_address and "
            "cluster.master_port"
        )
    for remark in report.findings:
        _log.warning("%s: %s", remark.check, remark.text)
    return Fit(rendezvous, port, report.is_node_local)


def _error(problems: list[Finding]) -> PreflightError:
    lines = "".join(f"\n  {problem.check}: {problem.text}" for problem in problems)
    return PreflightError(f"preflight checks failed:{lines}")
