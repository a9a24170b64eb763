"""A running Prefect server, and a browser to look at its pages.

Servers end with the file that uses them, because an idle one takes some percent of a core.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.support import prefect_servers, team_servers

SHADOWS = ("flows", "json", "uvicorn")
Deployed = Callable[..., dict[str, dict[str, Any]]]
Up = Callable[..., AbstractContextManager[subprocess.Popen[str]]]
Ask = Callable[..., Any]

FlowProcess = Callable[[Path, str], tuple[subprocess.Popen[str], str]]

WAITING_FLOW = """
import sys, time
from pathlib import Path
from flows.server.prefect_server import become_client
become_client(Path(sys.argv[1]), sys.argv[2])

from prefect import flow
from prefect.runtime import flow_run
from flows.pretrain import record_process

@flow
def waits():
    record_process()
    print(flow_run.id, flush=True)
    time.sleep(600)

waits()
"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 180.0  # ample: a page takes one or two
CLICK = """
(text) => {
    const leaves = [...document.querySelectorAll("*")].filter(each => !each.children.length)
    const found = leaves.find(each => each.textContent.trim() === text)
    found?.click()
    return Boolean(found)
}
"""
FIRST_SCREEN = """
(text) => {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
    while (walker.nextNode()) {
        const range = document.createRange()
        range.selectNode(walker.currentNode)
        const {bottom, height} = range.getBoundingClientRect()
        if (height && bottom < window.innerHeight && walker.currentNode.textContent.match(text)) return true
    }
    return false
}
"""
"""Whether a text that matches a regular expression is visible without scrolling."""


class Page:
    """A web page as a person sees and uses it, through Chromium's DevTools protocol."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def click(self, text: str) -> None:
        """Click the element with exactly this text, once it exists."""
        self.wait_until(f"({CLICK})({json.dumps(text)})")

    def log_in(self, server: str, key: str) -> None:
        """Give the server's login page the key, and wait until it has been accepted."""
        self.open(f"{server}/login")
        field = "document.querySelector('input[type=password]')"
        self.wait_until(f"Boolean({field}?.form)")
        self.value(f"{field}.focus()")
        self.send("Input.insertText", text=key)
        self.value(f"{field}.form.requestSubmit()")
        self.wait_until("!location.pathname.startsWith('/login')")

    def text(self, *awaited: str) -> str:
        """Return the visible text, once it contains all that is awaited."""
        conditions = [f"document.body.innerText.includes({json.dumps(each)})" for each in awaited]
        self.wait_until(" && ".join(conditions))
        return str(self.value("document.body.innerText"))

    def on_first_screen(self, pattern: str) -> str:
        """Return the visible text, once a text that is visible without scrolling matches the regular expression."""
        self.wait_until(f"({FIRST_SCREEN})({json.dumps(pattern)})")
        return str(self.value("document.body.innerText"))

    def value(self, script: str) -> Any:
        """The value of a JavaScript expression; for a promise, the value that it resolves to."""
        evaluated = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return evaluated["result"].get("value")

    def wait_until(self, script: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not self.value(script):
            assert time.monotonic() < deadline, f"not {script}, but: {self.value('document.body.innerText')}"
            time.sleep(0.1)

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (message := json.loads(self._connection.recv(SECONDS))).get("id") != number:
            pass  # an event; nothing here waits for one
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result


@pytest.fixture(scope="module")
def server(new_home: Callable[[Path], Path]) -> Iterator[tuple[Path, str]]:
    """Home and API of a server whose root all users may read, as is common.

    It is started in a folder with modules that have the names of the server's own.
    """
    root = Path(tempfile.mkdtemp(prefix="prefect-"))
    root.chmod(0o755)
    home, current = new_home(root / "prefect"), root / "current"
    current.mkdir()
    for module in SHADOWS:
        (current / f"{module}.py").write_text("raise SystemExit('shadowed')")
    with prefect_servers.running(home, current) as api_url:
        yield home, api_url
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def deployed(server: tuple[Path, str], ask: Ask) -> Deployed:
    """Runs ``t5-pretrain deploy`` with options on the server; returns the deployments by name."""
    home, api_url = server

    def deployed(*options: str) -> dict[str, dict[str, Any]]:
        program = "from flows.cli.__main__ import main; main()"
        command = [sys.executable, "-c", program, "deploy", "--root", str(home.parent), *options]
        environment = prefect_servers.client_environment(home, api_url)
        result = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        ours = {"work_pools": {"name": {"any_": ["t5-pretrain"]}}}  # other tests deploy outside the pool
        return {each["name"]: each for each in ask(home, f"{api_url}/deployments/filter", ours)}

    return deployed


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """An empty page of a headless browser."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:  # `make test` runs .ci/browser first, which could not install one either
        pytest.skip("no Chromium on PATH to look at Prefect's pages with: apt-get install chromium")
    profile = tmp_path_factory.mktemp("browser")
    # Chromium's sandbox needs a user other than root. Chromium opens only pages of servers that the tests start.
    command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--no-first-run", "--disable-background-networking", "--window-size=1400,1400"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    environment = os.environ | {"HOME": str(profile), "TMPDIR": str(profile)}
    with open(profile / "log", "wb") as log:
        browser = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        with connect(_first_page(browser, profile), max_size=None) as connection:
            yield Page(connection)
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()


def _first_page(browser: subprocess.Popen[bytes], profile: Path) -> str:
    """The WebSocket URL that controls the first page."""
    port_file, deadline = profile / "DevToolsActivePort", time.monotonic() + SECONDS
    while not (port_file.exists() and len(port_file.read_text().split()) == 2):
        alive = browser.poll() is None and time.monotonic() < deadline
        assert alive, f"no browser: {(profile / 'log').read_text('utf-8', 'replace')}"
        time.sleep(0.05)
    port = port_file.read_text().split()[0]
    with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as response:
        return next(str(each["webSocketDebuggerUrl"]) for each in json.load(response) if each["type"] == "page")


@pytest.fixture(scope="session")
def up() -> Up:
    """Runs ``t5-pretrain up`` on a root and a port, with more options, until the block ends.

    Keywords are added to its environment.

    The user's own Prefect settings are in ``root/user``, unless that environment says otherwise. The current folder has
    settings that make any process fail that reads them.
    """

    @contextmanager
    def up(root: Path, port: int, *options: str, **more: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-c", prefect_servers.PROGRAM, "up"]
        command += ["--root", str(root), "--port", str(port), *options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        environment |= {"PREFECT_HOME": str(root / "user")} | more
        current = root / "current"
        current.mkdir(parents=True, exist_ok=True)
        (current / ".env").write_text("PREFECT_LOGGING_LEVEL=none of the levels\n")
        with subprocess.Popen(command, env=environment, cwd=current, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert "deployed" in process.stdout.readline()
            assert "their defaults" in process.stdout.readline()
            try:
                yield process
            finally:
                process.terminate()

    return up


@pytest.fixture
def flow_process() -> Iterator[FlowProcess]:
    """Starts flows that only wait, as clients of the server in a home; returns the process and the flow run's id."""
    with ExitStack() as stack:

        def start(home: Path, api_url: str) -> tuple[subprocess.Popen[str], str]:
            command = [sys.executable, "-c", WAITING_FLOW, str(home), api_url]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            return process, process.stdout.readline().strip()

        yield start


@pytest.fixture(scope="module")
def team(new_home: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[team_servers.Team]:
    """A team's server with the deployments, on SQLite. test_team_server.py has one on PostgreSQL."""
    team = team_servers.Team(tmp_path_factory.mktemp("team"), None)
    new_home(team.home)
    with team.running():
        team.call("deploy", "--root", str(team.root))
        yield team


@pytest.fixture(scope="session")
def ask() -> Ask:
    """Asks the API of the server in a home, as a client that has the key."""
    return prefect_servers.ask
