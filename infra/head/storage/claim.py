"""The head's claim to the files of a run on its hosts: made before anything is read or written there, then renewed.

Agents renew it for as long as the head holds the run, including the time between two attempts and the gathering of
checkpoints, so that no other head adopts the run while this one is alive.
"""

import logging
from collections.abc import Mapping, Sequence
from copy import copy

from infra.head.hosts.agents import Agents
from infra.head.hosts.nodes import Nodes
from infra.head.storage.node_paths import NodeRun
from infra.node.attempts.run_ownership import Claimed, ClaimRun, DisownRun, Mode, Owner
from t5train.errors import HostError, RunOwned

_DEADLINE_SECONDS = 60.0
_log = logging.getLogger(__name__)


_Answers = Mapping[str, Claimed | HostError]


class Claim:
    """This head's claim to the files of one run on the hosts of the last ``take``, renewed until it is released.

    A claim outlives an attempt, so it belongs to the HeldRun, and is released with it.
    """

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._kept: _KeptClaim | None = None

    def take(self, run: NodeRun, required: Sequence[str], others: Sequence[str], adopt: bool) -> list[Owner]:
        """Claim the run on ``required`` hosts, and on ``others`` that answer.

        Returns the other heads from which it was adopted. Raises RunOwned if the run belongs to another head, and the
        HostError of a required host that does not answer.
        """
        nodes = run.nodes.on(*required, *others)
        _require_free(run, _answered(required, _ask(nodes, run, Mode.LOOK)), adopt)
        states = _answered(required, _ask(nodes, run, Mode.ADOPT if adopt else Mode.CLAIM))
        if not all(state.is_ours for state in states.values()):
            fresh = [host for host, state in states.items() if state.is_ours and state.owner is None]
            nodes.on(*fresh).ask(DisownRun(nodes.scratch, run.name, run.owner), _DEADLINE_SECONDS)
            _require_free(run, states, adopt)
        if self._kept is not None:
            self._kept.is_over = True
        self._kept = _KeptClaim(run)
        hosts = {**dict.fromkeys(run.nodes.hosts), **states}
        for agent in self._agents.on(nodes.on(*hosts), run.owner.lease_seconds).values():
            agent.claim = self._kept
        owners = dict.fromkeys(state.owner for state in states.values() if state.owner)
        return [owner for owner in owners if owner.unique_id != run.owner.unique_id]

    def require_kept(self) -> None:
        """Raise RunOwned if another head has taken over the run's files since."""
        if self._kept is not None and self._kept.lost is not None:
            raise copy(self._kept.lost)  # each caller gets its own traceback

    def release(self) -> None:
        """Stop renewing the claim, if it was taken, and let the leases expire. Does nothing the second time.

        Hosts are asked to release only a run that has finished (ReleaseRun), and after that must not get a renewal.
        """
        if self._kept is not None:
            self._kept.is_over = True
            self._agents.await_answers()
            self._kept = None


class _KeptClaim:
    """The state of a claim while agents renew it. Their threads share it; each passes on its own host's answers."""

    def __init__(self, run: NodeRun) -> None:
        self.request = ClaimRun(run.nodes.scratch, run.name, run.owner, Mode.CLAIM)
        self.is_over = False
        self.lost: RunOwned | None = None
        self._run, self._silent = run, set[str]()

    def take_answer(self, host: str, answer: Claimed | str) -> None:
        """See infra.head.hosts.agents."""
        if isinstance(answer, str):
            if host not in self._silent:
                _log.warning("cannot renew the lease of run %s on %s, will retry: %s", self._run.name, host, answer)
            self._silent.add(host)
            return
        self._silent.discard(host)
        try:
            _require_free(self._run, {host: answer}, adopt=False)
        except RunOwned as error:
            self.is_over, self.lost = True, error
            _log.error("%s", error)


def _ask(nodes: Nodes, run: NodeRun, mode: Mode) -> _Answers:
    return nodes.ask(ClaimRun(nodes.scratch, run.name, run.owner, mode), _DEADLINE_SECONDS)


def _answered(required: Sequence[str], answers: _Answers) -> dict[str, Claimed]:
    """The answers of hosts. Raises the HostError of a required host that did not answer; logs those of others."""
    for host, each in answers.items():
        if isinstance(each, HostError):
            if host in required:
                raise each
            _log.warning("cannot ask %s which head owns the run there: %s", host, each)
    return {host: each for host, each in answers.items() if not isinstance(each, HostError)}


def _require_free(run: NodeRun, states: Mapping[str, Claimed], adopt: bool) -> None:
    """Raise RunOwned if another head owns the run on a host, unless ``adopt`` is set and the lease has expired."""
    refused = {
        host: state
        for host, state in states.items()
        if state.owner is not None and not state.is_ours and not (adopt and state.left_seconds <= 0)
    }
    if refused:
        raise _owned(run, refused)


def _owned(run: NodeRun, refused: Mapping[str, Claimed]) -> RunOwned:
    host, state = max(refused.items(), key=lambda item: item[1].left_seconds)
    what = f"the checkpoints of run {run.folder.name} on {', '.join(refused)} are owned by {state.owner}"
    another = "choose another --name"
    if state.left_seconds > 0:
        lease = f"The lease of that head on {host} is valid for another {state.left_seconds:.0f} s: it may be running"
        return RunOwned(
            f"{what}. {lease}. End that head, wait until its lease expires, then take the run over with --adopt, or "
            f"{another}"
        )
    return RunOwned(f"{what}. The lease of that head has expired. Take the run over with --adopt, or {another}")
