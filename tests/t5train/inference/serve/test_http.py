"""The server of a model as clients see it: who may ask, what is refused in one line, and what happens at its end."""

import json
import select
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.stub_server import StubServer, stub_server
from tests.support.waiting import await_that

KEY = "0123456789abcdef"
BODY_BYTES = 2000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubServer]:
    """A server with room for two waiting texts."""
    with stub_server(tmp_path_factory.mktemp("stub"), waiting_texts=2, body_bytes=BODY_BYTES) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubServer]:
    """A server that asks for a key."""
    with stub_server(tmp_path_factory.mktemp("guarded"), key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubServer]:
    """A server that has little time."""
    with stub_server(tmp_path_factory.mktemp("hasty"), read_seconds=0.2, answer_seconds=0.2) as running:
        yield running


def refused(response: httpx.Response, status: int) -> str:
    """The reason that a request was refused with, which is one line."""
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json"), response.text
    assert "\n" not in response.text
    (reason,) = response.json().values()
    return str(reason)


def asks(pool: ThreadPoolExecutor, server: StubServer, text: str) -> Any:
    return pool.submit(server.ask, text)


def test_texts_are_answered_in_their_order(server: StubServer) -> None:
    answers = server.ask(["b", "a"]).json()["answers"]
    assert [(each["text"], each["filled"], each["ended"]) for each in answers] == [("b", "B", True), ("a", "A", True)]


@pytest.mark.parametrize(
    ("request_of", "status", "reason"),
    [
        ({"content": b"{}"}, 422, "text is missing: set it"),
        ({"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "must be application/json"),
        ({"content": b"{}", "headers": {"Host": "evil.example"}}, 421, "'evil.example'"),
        ({"content": b"{}", "headers": {"Host": "127.0.0.1.evil.example:80"}}, 421, "this server is localhost"),
        ({"url": "/nothing"}, 404, "Not Found"),
        ({"url": "/generate/", "headers": {"Host": "evil.example"}}, 404, "Not Found"),
        ({"method": "GET"}, 405, "Method Not Allowed"),
        ({"content": b" " * 10_000_000}, 413, f"the body has more than {BODY_BYTES} bytes"),
        ({"content": iter([b" "] * (BODY_BYTES + 1))}, 413, f"the body has more than {BODY_BYTES} bytes"),
        ({"json": {"text": "fail"}}, 500, "an error of the server: its log has more"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(
    server: StubServer, request_of: dict[str, Any], status: int, reason: str
) -> None:
    path = server.url + request_of.pop("url", "/generate")
    sent = {"method": "POST", "headers": {"Content-Type": "application/json"}} | request_of
    sent["headers"] = {"Content-Type": "application/json"} | sent["headers"]
    assert reason in refused(httpx.request(url=path, timeout=600, **sent), status)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9", "[::1]:9"])
def test_a_tunnel_to_the_server_has_a_name_of_loopback(server: StubServer, host: str) -> None:
    assert httpx.get(f"{server.url}/health", headers={"Host": host}, timeout=600).is_success


def test_no_page_of_another_origin_may_ask(server: StubServer) -> None:
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    response = httpx.options(f"{server.url}/generate", headers=asked, timeout=600)
    assert not response.is_success
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("sent", [None, "Bearer 0123456789abcdeX", KEY, "Bearer", "Bearer \xe9"])
def test_a_wrong_key_is_refused(guarded: StubServer, sent: str | None) -> None:
    headers = {"Authorization": sent.encode("latin-1")} if sent is not None else None
    response = guarded.ask("a", headers=headers)
    assert "the key is missing or wrong" in refused(response, 401)
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert guarded.decoded() == []


def test_with_the_key_a_text_is_answered_and_without_it_only_health_and_the_page(guarded: StubServer) -> None:
    for path in ("health", ""):
        assert httpx.get(f"{guarded.url}/{path}", timeout=600).is_success
    assert guarded.ask("a", headers={"Authorization": f"Bearer {KEY}"}).is_success
    (guarded.folder / "decoded").unlink()


def test_what_does_not_fit_is_refused_and_a_client_that_goes_makes_room(server: StubServer) -> None:
    with ThreadPoolExecutor() as pool:
        first = asks(pool, server, server.hold("release"))
        await_that(lambda: [server.hold("release")] in server.decoded())
        gone = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0))
        body = json.dumps({"text": ["gone", "gone too"]})
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        gone.sendall(f"POST /generate HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
        await_that(lambda: server.waiting() == 2)
        response = server.ask("more")
        assert refused(response, 503) == "2 texts are waiting, and at most 2 can: try again later"
        assert response.headers["Retry-After"] == "1"
        gone.close()
        await_that(lambda: server.waiting() == 0)
        (server.folder / "release").touch()
        assert first.result().is_success
    assert server.ask("after").is_success
    assert {"gone", "gone too", "more"}.isdisjoint(text for batch in server.decoded() for text in batch)


BEGUN = "POST /generate HTTP/1.1\r\nHost: localhost\r\n"
LATE = "HTTP/1.1 408 "
"""What also a request gets that a busy machine has not sent in time."""


@pytest.mark.parametrize("sent", ["", BEGUN, f"{BEGUN}Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{{"])
def test_a_slow_client_is_cut(hasty: StubServer, sent: str) -> None:
    with closing(socket.create_connection(("127.0.0.1", httpx.URL(hasty.url).port or 0), 60)) as client:
        client.sendall(sent.encode())
        head, _, body = client.makefile("rb").read().decode().partition("\r\n\r\n")
    assert head.startswith(LATE)
    assert json.loads(body) == {"error": "the request was not complete within 0.2 seconds"}


def test_a_slow_client_cannot_go_on_after_it_was_refused(hasty: StubServer) -> None:
    answer = LATE
    while answer.startswith(LATE):
        with closing(socket.create_connection(("127.0.0.1", httpx.URL(hasty.url).port or 0), 60)) as client:
            client.sendall(f"{BEGUN}Content-Type: text/plain\r\nContent-Length: 99\r\n\r\n{{".encode())
            answer = client.makefile("rb").read().decode()
    assert answer.startswith("HTTP/1.1 415 ")
    assert answer.count("HTTP/1.1") == 1


def test_a_slow_client_is_cut_also_after_a_request_that_was_answered(hasty: StubServer) -> None:
    body = '{"text": "a"}'
    first = f"{BEGUN}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    answers = LATE
    while not answers.startswith("HTTP/1.1 200 "):  # the first one can be late itself
        with closing(socket.create_connection(("127.0.0.1", httpx.URL(hasty.url).port or 0), 60)) as client:
            client.sendall(f"{first}{BEGUN}Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{{".encode())
            answers = client.makefile("rb").read().decode()
    assert answers.count("HTTP/1.1") == 2
    assert answers.endswith('{"error": "the request was not complete within 0.2 seconds"}')


def test_requests_that_are_given_up_leave_nothing_on_standard_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with stub_server(tmp_path, answer_seconds=0.2) as server:
        refused(server.ask([server.hold("never"), "a"]), 503)
        await_that(lambda: server.ask("b").is_success)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_client_that_does_not_take_its_answer_is_cut(tmp_path: Path) -> None:
    body = json.dumps({"text": "a" * 1_000_000})
    with stub_server(tmp_path, answer_seconds=3) as server, closing(socket.socket()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", httpx.URL(server.url).port or 0))
        client.sendall(f"{BEGUN}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        reset = select.poll()
        reset.register(client, 0)
        assert reset.poll(60_000) == [(client.fileno(), select.POLLERR | select.POLLHUP)]


def test_the_page_offers_the_tasks_of_the_model(server: StubServer) -> None:
    page = httpx.get(server.url, timeout=600).text
    assert '<select name="task"><option>a&lt;b<option>en-de</select>' in page


def test_what_is_no_http_is_refused_in_one_line(server: StubServer) -> None:
    with closing(socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), 60)) as client:
        client.sendall(b"hello\r\n\r\n")
        answer = client.makefile("rb").read().decode()
    assert answer.startswith("HTTP/1.1 400 ")
    assert answer.endswith('{"error": "Invalid HTTP request received."}')


def test_an_answer_that_takes_too_long_is_given_up(hasty: StubServer) -> None:
    while (response := hasty.ask(hasty.hold("never"))).status_code == httpx.codes.REQUEST_TIMEOUT:
        pass  # it was late itself
    (hasty.folder / "never").touch()
    assert refused(response, 503).startswith("no answer within 0.2 seconds")


@pytest.mark.slow
def test_at_sigterm_what_was_taken_is_answered_and_nothing_else_is_taken(tmp_path: Path) -> None:
    with stub_server(tmp_path) as server, ThreadPoolExecutor() as pool:
        running = asks(pool, server, server.hold("release"))
        await_that(server.decoded)
        waiting = asks(pool, server, "waiting")
        await_that(lambda: server.waiting() == 1)
        server.process.send_signal(signal.SIGTERM)
        await_that(lambda: _refuses(server))
        (tmp_path / "release").touch()
        assert running.result().is_success
        assert waiting.result().json()["answers"][0]["filled"] == "WAITING"
        assert server.process.wait(600) == -signal.SIGTERM


@pytest.mark.slow
def test_a_second_ctrl_c_refuses_what_was_taken_in_one_line_and_ends_the_server(tmp_path: Path) -> None:
    with stub_server(tmp_path) as server, ThreadPoolExecutor() as pool:
        running = asks(pool, server, server.hold("never"))
        await_that(server.decoded)
        server.process.send_signal(signal.SIGINT)
        await_that(lambda: _refuses(server))
        server.process.send_signal(signal.SIGINT)
        assert refused(running.result(), 503) == "the server was ended"
        server.process.wait(600)


def _refuses(server: StubServer) -> bool:
    try:
        httpx.get(f"{server.url}/health", timeout=600)
    except httpx.TransportError:  # also if it had just connected when the server ended
        return True
    return False
