"""Whether the hosts of a run can train together, asked before it begins; spares stand in for those that are down."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.cluster import failure_history
from infra.cluster.attachment import hosts_at_work
from infra.cluster.hosts import Hosts
from infra.cluster.remote import Ssh, Transport
from infra.preflight.needs import Needs
from infra.preflight.preflight import require_agreement
from t5train.errors import PreflightError
from t5train.model.shape import T5Shape
from t5train.spec import RunSpec
from tasks.training_run import training_hosts

_log = logging.getLogger(__name__)


def require_hosts(spec: RunSpec, of_model: T5Shape, text_bytes: int) -> None:
    """PreflightError unless those that are to train can train together, as far as that can be known now.

    One that does not answer, which can pass, is done without if a spare can take its place, and the spare is asked.
    Those whose ranks are at work were asked when these began, and are not given up for what may have come up since.
    """
    hosts, silent = training_hosts(spec), dict[str, str]()
    if hosts == hosts_at_work(spec.run_folder):
        return
    while found := _silent(spec, hosts, of_model, text_bytes):
        for said in found.values():
            _log.warning("%s", said)
        silent |= found
        failure_history.set_aside(spec.run_folder, silent)
        hosts = training_hosts(spec)
        if silent.keys() & set(hosts.names):
            raise _irreplaceable(silent)


@contextmanager
def asked(spec: RunSpec, hosts: Hosts, of_model: T5Shape, text_bytes: int) -> Iterator[tuple[Needs, Transport]]:
    """What a run whose text has so many bytes asks of these hosts, and the way to them.

    Token shards take no more room than plain text does.
    """
    with tempfile.TemporaryDirectory(prefix="t5-preflight-") as folder:
        yield Needs.of_run(spec, hosts, of_model, text_bytes), Ssh.configured(spec.cluster, Path(folder))


def _silent(spec: RunSpec, hosts: Hosts, of_model: T5Shape, text_bytes: int) -> dict[str, str]:
    with asked(spec, hosts, of_model, text_bytes) as (needs, transport):
        return require_agreement(needs, transport)


def _irreplaceable(silent: dict[str, str]) -> PreflightError:
    lines = "".join(f"\n  {said}" for said in silent.values())
    return PreflightError(
        "some hosts cannot be reached, and there are not enough spares with the same number of slots to replace them:"
        f"{lines}\nFix these hosts, exclude them (--exclude), or add spares (--spares)"
    )
