"""A Python that starts at once: ``python -m MODULE`` is forked from a process that has already imported that module.

``sys.executable`` is replaced by a small program (``stand_in.c``). It sends its arguments, environment, current folder
and standard streams to that process through a socket, and exits with the exit code of the process that is forked for
it.
"""

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.node.processes import die_with_parent
from tests.acceptance.io_faults import interposer

NODE_PARENT = "T5_IO_FAULTS_NODE_PARENT"
"""Environment variable of ``infra.node``: the parent of that host's node folder."""
NODE_PYTHON = "node-python"
"""The program that stands in for the hosts' Python; it lies beside the other one."""
_SOURCE = Path(__file__).with_suffix(".c")
_CLIENT_DIED = 71
Main = Callable[[list[str]], int]


def build(folder: Path) -> Path:
    """Compile the program into a folder; return its path."""
    program = folder / "stand_in"
    subprocess.run(["cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-o", program, _SOURCE], check=True)
    return program


class StandIn:
    """A copy of the program, and the server process that answers it. ``close`` ends the server.

    The server is forked from this process. It first calls ``imports``, which imports modules and returns their ``main``
    functions by module name.
    """

    def __init__(self, built: Path, name: str, imports: Callable[[], dict[str, Main]]) -> None:
        self.program = built.with_name(name)
        self.program.hardlink_to(built)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"{self.program}.socket")
        listener.listen(64)
        self._pid = os.fork()
        if self._pid == 0:
            die_with_parent(signal.SIGKILL)
            _serve(listener, imports())
        listener.close()

    def close(self) -> None:
        """End the server. The processes that it has forked end with their clients."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class LocalHosts:
    """Hosts that are folders of this machine.

    Actions run here, with the host's folder as the parent of its node folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._python = folder, Path(sys.executable).with_name(NODE_PYTHON)

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command that runs an action of infra.node; the action is the last argument."""
        env = shutil.which("env") or "/usr/bin/env"
        return [env, f"{NODE_PARENT}={self.folder / host}", str(self._python), "-m", "infra.node", argv[-1]]

    def scratch(self, host: str) -> Path:
        """The scratch folder of a host."""
        return self.folder / host / f"t5-pretrain-{os.getuid()}" / "scratch"


def _serve(listener: socket.socket, mains: dict[str, Main]) -> None:
    running = set[int]()
    gc.freeze()  # otherwise, a collection in a fork would write to most memory pages, and so copy them
    while True:
        client, _ = listener.accept()
        if (child := os.fork()) == 0:
            listener.close()
            _answer(client, mains)
        client.close()
        running = {each for each in running | {child} if os.waitpid(each, os.WNOHANG) == (0, 0)}


def _answer(client: socket.socket, mains: dict[str, Main]) -> None:
    """Act as the program that the client was started as."""
    length, streams, _, _ = socket.recv_fds(client, 8, 3)
    message = _receive(client, int.from_bytes(length, sys.byteorder))
    if not message:  # the client was killed before it sent anything
        os._exit(_CLIENT_DIED)
    fields = message.removesuffix(b"\0").split(b"\0")
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 - descriptors
    os.chdir(fields[0])
    end = fields.index(b"")
    os.environ.clear()
    for name, _, value in (each.partition(b"=") for each in fields[end + 1 :]):
        os.environb[name] = value
    threading.Thread(target=_exit_when_closed, args=(client,), daemon=True).start()
    code = _run([os.fsdecode(each) for each in fields[1:end]], mains)
    for text in (sys.stdout, sys.stderr):
        text.flush()
    client.sendall(bytes([code]))
    os._exit(code)


def _receive(client: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count and (more := client.recv(count - len(content))):
        content += more
    return content


def _exit_when_closed(client: socket.socket) -> None:
    client.recv(1)
    os._exit(_CLIENT_DIED)


def _run(argv: list[str], mains: dict[str, Main]) -> int:
    """Run ``python [-P] -m MODULE ARGUMENT...``; return the exit code."""
    module, *arguments = argv[argv.index("-m") + 1 :]
    try:
        if region := os.environ.get(interposer.ENVIRONMENT):
            interposer.attach(Path(region))
        return mains[module](arguments)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
