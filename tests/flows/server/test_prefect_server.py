"""Which process can answer as the server, and what decides which server is used."""

import os
import socket
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock
from uuid import uuid4

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.server import api_key, prefect_server
from flows.server.prefect_profile import CHOOSING, UserProfiles
from flows.server.prefect_server import HOST, _refuse_after, answers, configured_api_url, join, listening, own_server
from flows.workers import run_records
from infra.node.ports import free_port
from t5train.errors import LaunchError, StorageError
from t5train.files.locks import private_folder
from t5train.progress import silent

ASK = """
from flows.server.prefect_server import configured_api_url
print(configured_api_url())
from prefect.logging.configuration import setup_logging
setup_logging()
from prefect.settings import get_current_settings
print(get_current_settings().home)
"""
LOGGING = """
version: 1
handlers: {stranger: {"()": os.system, command: "echo code of a stranger"}}
root: {handlers: [stranger]}
"""


def found_in(folder: Path, home: str, **variables: str) -> list[str]:
    """The API's URL and Prefect's home, as a process in a folder finds them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": home, **variables}
    command = [sys.executable, "-P", "-c", ASK]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("url", ["", "http://team.example/api"])
def test_an_empty_url_in_the_environment_or_the_profile_counts_as_none(tmp_path: Path, url: str) -> None:
    (tmp_path / "profiles.toml").write_text(f'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "{url}"\n')
    assert found_in(tmp_path, str(tmp_path), PREFECT_API_URL="") == [url or "None", str(tmp_path)]


def test_relative_folders_and_a_slash_after_the_url_mean_what_they_mean_to_prefect_in_the_current_folder(
    tmp_path: Path,
) -> None:
    found = found_in(tmp_path, "mine", PREFECT_API_URL="http://team.example/api/")
    assert found == ["http://team.example/api", str(tmp_path / "mine")]


def test_the_port_of_a_server_that_died_refuses_clients_and_cannot_be_taken() -> None:
    port = free_port()
    with listening(port) as bound:
        socket.create_connection((HOST, port), 5).close()
        with subprocess.Popen([sys.executable, "-c", ""]) as server:
            _refuse_after(server, bound)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), 5)
        with pytest.raises(OSError, match="Address already in use"):
            socket.create_server((HOST, port))
    socket.create_server((HOST, port)).close()


def test_settings_in_the_current_folder_choose_no_server_and_run_no_code(tmp_path: Path) -> None:
    (tmp_path / "logging.yml").write_text(LOGGING)
    (tmp_path / "prefect.toml").write_text(f'[logging]\nconfig_path = "{tmp_path / "logging.yml"}"\n')
    (tmp_path / ".env").write_text("PREFECT_API_URL=http://stranger.invalid/api\n")
    assert found_in(tmp_path, str(tmp_path / "home")) == ["None", str(tmp_path / "home")]


def test_a_home_that_other_users_can_access_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "home").mkdir(mode=0o755)
    (tmp_path / "home" / "server.lock").symlink_to(tmp_path / "precious")
    with (
        pytest.raises(StorageError, match="is not a folder that only user"),
        own_server(tmp_path / "home", free_port(), silent),
    ):
        pass
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_new_server_has_a_new_key_even_while_flows_of_the_last_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = private_folder(tmp_path / "home")
    shown = api_key.renew(home)
    run_records.hold(run_records.folder_of(home, None), uuid4(), uuid4())
    monkeypatch.setattr(prefect_server, "serving", Mock(side_effect=LaunchError("it did not start")))
    with pytest.raises(LaunchError, match="did not start"), own_server(home, free_port(), silent):
        pass
    assert api_key.read(home) != shown


@pytest.mark.parametrize(
    ("before", "after"), [("", HOST), ("store.example", f"store.example,{HOST}"), (HOST, HOST), ("*", "*")]
)
def test_a_server_on_this_machine_is_never_contacted_through_a_proxy(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", before)
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
    configured_api_url()
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == after
    assert urllib.request.proxy_bypass(f"{HOST}:4200")


def test_a_client_of_a_server_of_up_that_has_ended_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CHOOSING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(tmp_path / "profiles.toml"))
    api_url = f"http://{HOST}:{free_port()}/api"
    UserProfiles.find().write(api_url, "t5-pretrain:key")
    with pytest.raises(
        LaunchError, match=r"`t5-pretrain up` has ended\. Start it again, or use another profile: `prefect"
    ):
        join(tmp_path, api_url)
    monkeypatch.setenv("PREFECT_API_URL", api_url)
    with pytest.raises(LaunchError, match="unset PREFECT_API_URL"):
        join(tmp_path, api_url)


class _AnyPage(BaseHTTPRequestHandler):
    """Answers every request with a page, as Prefect's server does outside of its API."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "6")
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_a_url_that_is_not_that_of_an_api_is_an_error_that_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer((HOST, 0), _AnyPage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://{HOST}:{server.server_port}"
        monkeypatch.setenv("PREFECT_API_URL", url)
        with (
            temporary_settings({PREFECT_API_URL: url}),
            pytest.raises(LaunchError, match=rf"{url} does not respond as .*PREFECT_API_URL .* ends with /api"),
        ):
            join(tmp_path, url)
        server.shutdown()


def test_what_does_not_speak_http_or_is_no_url_is_no_server() -> None:
    assert not answers(f"http://{HOST}:1/api with a space")
    with socket.create_server((HOST, 0)) as other:

        def speak() -> None:
            with other.accept()[0] as client:
                client.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        threading.Thread(target=speak, daemon=True).start()
        assert not answers(f"http://{HOST}:{other.getsockname()[1]}/api")
