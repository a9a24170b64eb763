"""The facts of all hosts at once, judged."""

import json
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from infra.cluster.remote import Answer, Reply, Transport, node_command, run_everywhere
from infra.cluster.shipping import ship
from infra.preflight.checks import LAUNCHER, Judgement, judge, of_error
from infra.preflight.facts import Facts, Question, Software
from infra.preflight.findings import Finding, Heard
from infra.preflight.machine import identity
from infra.preflight.needs import Needs
from infra.preflight.software import software
from t5train.atomic import write_text
from t5train.errors import HostError, RemoteFailed

_DEADLINE_SECONDS = 60.0  # importing torch from a slow disk, where accelerators are asked for
_STARTERS = {"pdsh": "pdsh", "slurm": "srun", "openmpi": "mpirun"}


def survey(needs: Needs, transport: Transport) -> Judgement:
    """Ask every host, and judge what those say that answer; StorageError if the root cannot be written here.

    Hosts that are to be sent their code are sent it first.
    """
    asked_at: dict[str, float] = {}
    heards: dict[str, Heard] = {}
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
                    heards[host] = Heard(_facts(reply), asked_at[host], time.time())
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
    in_order = {host: heards[host] for host in needs.slots if host in heards}
    judged = judge(in_order, needs, _own(needs), nonce, identity())
    return replace(judged, findings=[*findings, *judged.findings])


def _own(needs: Needs) -> Software:
    """The head's software. While it runs others may have changed its code on disk, of which it has sent what it is."""
    found = software(dict(needs.spec))
    return found if needs.code is None else replace(found, code_digest=needs.code)


def _question(needs: Needs, host: str, nonce_path: Path) -> Question:
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
