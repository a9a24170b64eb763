"""Dask executes what a client sends, so a client without the run's credentials is refused, at every open port."""

import json
import ssl
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from socket import create_connection

import psutil
import pytest

from infra.head.tokenising.dask_scheduler import new_credentials
from infra.head.tokenising.scheduler_process import scheduler_process
from t5train.data.worker_processes import Json
from tests.infra.head.tokenising.conftest import Site

CLIENTS = """
import json, sys
from distributed import Client, Security
from infra.node.stages.dask_settings import security
from infra.node.stages.dask_settings import Credentials

for given, seconds in json.loads(sys.argv[2]):
    scheme, secure = ("tls", security(Credentials(**given))) if given else ("tcp", Security())
    try:
        with Client(f"{scheme}://127.0.0.1:{sys.argv[1]}", security=secure, timeout=seconds):
            print("accepted")
    except OSError:
        print("refused")
"""


def test_only_a_client_with_the_credentials_of_the_run_is_accepted(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    messages = list[Json | None]()
    with scheduler_process(5, messages.append) as scheduler:
        own = asdict(scheduler.credentials)
        given = [(own, 120), (None, 2), (asdict(new_credentials()), 2)]
        result = run_python(CLIENTS, str(scheduler.port), json.dumps(given))
    assert result.stdout.split() == ["accepted", "refused", "refused"], result.stderr


def test_an_older_tls_is_refused_even_with_the_credentials(tmp_path: Path) -> None:
    versions = list[str | None]()
    with scheduler_process(5, list[Json | None]().append) as scheduler:
        chain = tmp_path / "chain.pem"
        chain.write_text(scheduler.credentials.certificate + scheduler.credentials.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(chain)
        for newest in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
            context.maximum_version = newest
            with suppress(ssl.SSLError), ExitStack() as stack:
                connection = stack.enter_context(create_connection(("127.0.0.1", scheduler.port), timeout=120))
                versions.append(stack.enter_context(context.wrap_socket(connection)).version())
    assert versions == ["TLSv1.3"]


def listening(process: psutil.Process) -> set[int]:
    """The ports at which a process and its children listen."""
    found = set[int]()
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            found |= {each.laddr.port for each in one.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    return found


def answer_to(address: tuple[str, int], context: ssl.SSLContext | None) -> bytes:
    """What a server answers to a request of HTTP, in TLS without a certificate or in plain text."""
    with suppress(OSError), ExitStack() as stack:
        connection = stack.enter_context(create_connection(address, timeout=5))
        if context is not None:
            connection = stack.enter_context(context.wrap_socket(connection))
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return connection.recv(100)
    return b""


@pytest.mark.slow
def test_every_open_port_refuses_who_has_no_certificate(site: Site) -> None:
    found = set[int]()
    this, before = psutil.Process(), listening(psutil.Process())
    work = site.workers()("some_jobs:finish", site.jobs(2, seconds=2), lambda _: None)
    worker = threading.Thread(target=lambda: list(work))
    worker.start()
    while worker.is_alive():
        have_begun = site.begun() == 2
        found |= listening(this) - before
        if have_begun:
            break
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    answers = [answer_to(("127.0.0.1", port), each) for port in found for each in (None, context)]
    worker.join()
    assert len(found) == 3, "the scheduler's and two workers'"
    assert answers == [b""] * 6
