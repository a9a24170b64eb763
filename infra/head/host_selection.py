"""Chooses the hosts that train: those of the hostfile, with spares for hosts that are down or have failed twice."""

import logging
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from infra.head import retries
from infra.head.hosts.hostfile import Host, Hosts, read_hosts, spare_hosts
from infra.head.hosts.ssh import Ssh, Transport
from infra.head.preflight.host_preflight import require_agreement
from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.head.preflight.text_checks import NOT_READ, TextFacts
from t5train.checkpoint.resume import begun_shards
from t5train.data.shards import are_made
from t5train.errors import PreflightError
from t5train.model.model_shape import T5Shape
from t5train.spec import RunSpec

_log = logging.getLogger(__name__)


def with_spares(hosts: Hosts, spares: Hosts, unfit_hosts: Mapping[str, str]) -> Hosts:
    """Return the hosts, with unfit ones replaced by spares with enough slots, as long as there are any."""
    left = [spare for spare in spares.all if spare.name not in unfit_hosts]
    return Hosts(
        tuple(_or_spare(host, why, left) if (why := unfit_hosts.get(host.name)) else host for host in hosts.all)
    )


def _or_spare(host: Host, why: str, left: list[Host]) -> Host:
    for spare in left:
        if len(spare.slots) >= len(host.slots):
            left.remove(spare)
            _log.warning("%s %s: %s takes its place", host.name, why, spare.name)
            return Host(spare.name, spare.slots[: len(host.slots)])
    return host


def training_hosts(spec: RunSpec, running: Hosts | None = None, silent: Collection[str] = ()) -> Hosts:
    """Return the hosts that train.

    ``running`` are hosts whose ranks an earlier head left running. They are kept, including spares among them, unless
    one of them is unfit or their number of ranks differs. Hosts that were ``silent`` before the run began are replaced
    at once: not waiting for them loses nothing.
    """
    hosts, spares = read_hosts(spec.cluster), spare_hosts(spec.cluster)
    unfit = dict.fromkeys(sorted(silent), "does not answer") | retries.unfit(spec.run_folder)
    fit = {*hosts.names, *spares.names} - unfit.keys()
    if spares.all and running and running.num_ranks == hosts.num_ranks and fit.issuperset(running.names):
        return running
    return with_spares(hosts, spares, unfit)


def require_hosts(
    spec: RunSpec, of_model: T5Shape, text: TextFacts, running: Hosts | None = None, silent: Collection[str] = ()
) -> set[str]:
    """Raise PreflightError unless the hosts can train together, as far as this can be checked now.

    A host that does not answer is replaced by a spare if there is one, and the spare is checked, too. Hosts whose ranks
    are already running passed these checks before the ranks started; they are not checked again. Returns the ``silent``
    hosts and those that did not answer now.
    """
    hosts, answers, excluded = training_hosts(spec, running, silent), dict[str, str](), set(silent)
    if hosts == running:
        return excluded
    while found := _silent(spec, hosts, of_model, text):
        for said in found.values():
            _log.warning("%s", said)
        answers |= found
        excluded |= found.keys()
        hosts = training_hosts(spec, running, excluded)
        if answers.keys() & set(hosts.names):
            raise _irreplaceable(answers)
    return excluded


@contextmanager
def asked(
    spec: RunSpec, hosts: Hosts, of_model: T5Shape, text: TextFacts
) -> Iterator[tuple[LaunchRequirements, Transport]]:
    """Yield the requirements of a run with this text on these hosts, and the transport to the hosts.

    The size of the text stands for that of the token shards, which take no more disk space than plain text.
    """
    with tempfile.TemporaryDirectory(prefix="t5-preflight-") as folder:
        needs = LaunchRequirements.of_run(spec, hosts, of_model, text.size_bytes, tokenises=_tokenises(spec, text))
        yield needs, Ssh.configured(spec.cluster, Path(folder))


def _tokenises(spec: RunSpec, text: TextFacts) -> bool:
    """Whether hosts are to tokenise the text. They are not if the run was begun with token shards that still exist.

    Before a run has begun, only reading the whole text would show whether another run has made the same shards.
    """
    if spec.shards.executor == "local" or text == NOT_READ:
        return False
    begun = begun_shards(spec.run_folder)
    return begun is None or not are_made(spec.storage.root, spec.corpus, begun)


def _silent(spec: RunSpec, hosts: Hosts, of_model: T5Shape, text: TextFacts) -> dict[str, str]:
    with asked(spec, hosts, of_model, text) as (needs, transport):
        return require_agreement(needs, transport)


def _irreplaceable(silent: dict[str, str]) -> PreflightError:
    lines = "".join(f"\n  {said}" for said in silent.values())
    return PreflightError(
        "some hosts cannot be reached, and there are not enough spares with the same number of slots to replace them:"
        f"{lines}\nFix these hosts, exclude them (--exclude), or add spares (--spares)"
    )
