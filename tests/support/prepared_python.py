"""A Python whose processes start with slow packages imported: they are forks of a process that has imported them.

Tests set it as ``sys.executable``. What is started with it is a small process, which asks for a fork of the prepared
one with its arguments, environment, working folder, umask and standard streams. It ends as the fork ends, by an exit
status or by a signal, and if it is killed, so is the fork. Arguments other than ``-c CODE`` or ``-m MODULE``, with or
without ``-P`` before, are left to the real Python.

Tests of what a process does on a signal or as a member of its session, or of how Python ends, need the real one:
signals are not passed on, a fork has a session of its own, and errors of its last flush are suppressed.
Modules that read environment variables on import have read those of the prepared process.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

STAGES = (
    "t5train.data.corpus",
    "t5train.data.shards",
    "t5train.data.shard_worker",
    "t5train.data.pairs.pair_shard_worker",
    "t5train.data.vocabulary.tokenizer",
    "t5train.data.checks.removal",
    "t5train.data.checks.repetitions",
)
"""The modules of the data stages."""
_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

arguments = sys.argv[1:]
if arguments[arguments[:1] == ["-P"] :][:1] not in (["-c"], ["-m"]):
    os.execv({python!r}, [{python!r}, *arguments])
os.umask(umask := os.umask(0))
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
request = {{"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "umask": umask}}
socket.send_fds(connection, [b" "], [0, 1, 2])
connection.sendall(json.dumps(request).encode() + b"\\n")
os.closerange(0, 3)
status = int(connection.recv(16) or b"1")
if status < 0:
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class _Fork(NamedTuple):
    """A process that was forked, with what is readable when it has ended."""

    pid: int
    end: int
    connection: socket.socket
    """To the small process that stands for it. It is readable when that one has ended."""


@contextmanager
def prepared_python(folder: Path, modules: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the path of a Python that has imported modules with the given variables added to the environment."""
    address, client = str(folder / "socket"), folder / "python"
    client.write_text(_CLIENT.format(python=sys.executable, address=address), encoding="utf-8")
    client.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        command = [sys.executable, "-m", __name__, str(listener.fileno()), str(client), *modules]
        path = os.pathsep.join(filter(None, sys.path))
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env={**os.environ, **environment, "PYTHONPATH": path},
        )
    with server:  # closes its input, which ends it
        yield str(client)


def _serve(listener: socket.socket, executable: str) -> None:
    """Fork for each connection until standard input ends, and tell each how its fork ended."""
    with DefaultSelector() as selector:
        selector.register(listener, EVENT_READ)
        selector.register(sys.stdin, EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is listener:
                    _fork(listener, selector, executable)
                elif selector.get_map().get(key.fd) is key:  # its fork has not been reported in this turn
                    _report_end(key.data, selector)


def _fork(listener: socket.socket, selector: DefaultSelector, executable: str) -> None:
    connection, _ = listener.accept()
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile(encoding="utf-8") as lines:
        request = lines.readline()
    if not request.endswith("\n"):  # whoever asks was killed before it had asked
        connection.close()
    elif pid := os.fork():
        fork = _Fork(pid, os.pidfd_open(pid), connection)
        selector.register(fork.end, EVENT_READ, fork)
        selector.register(connection, EVENT_READ, fork)
    else:
        os.setsid()
        connection.close()
        listener.close()
        _become(json.loads(request), streams, executable)
    for stream in streams:
        os.close(stream)


def _report_end(fork: _Fork, selector: DefaultSelector) -> None:
    os.kill(fork.pid, signal.SIGKILL)  # it may be the connection that has ended
    _, status = os.waitpid(fork.pid, 0)
    selector.unregister(fork.end)
    selector.unregister(fork.connection)
    os.close(fork.end)
    with fork.connection, suppress(ConnectionError):
        fork.connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _become(request: dict[str, Any], streams: Sequence[int], executable: str) -> NoReturn:
    """Do as a new Python would that was started as requested."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.umask(request["umask"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.executable = executable
    os._exit(_run(request["arguments"]))


def _run(arguments: list[str]) -> int:
    is_safe = arguments[0] == "-P"
    option, program, *more = arguments[is_safe:]
    more_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [*([] if is_safe else [""]), *filter(None, more_path)]
    sys.argv = [option, *more]
    try:
        if option == "-m":
            sys.modules.pop(program, None)  # as it is not imported, but run
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = ModuleType("__main__")
            exec(program, sys.modules["__main__"].__dict__)  # noqa: S102 - what -c stands for
    except SystemExit as exit_:
        code = exit_.code
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
        return code if isinstance(code, int) else int(code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as a Python does that ends
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(BrokenPipeError):
                stream.flush()
    return 0


if __name__ == "__main__":
    gc.disable()  # importing makes next to no garbage, and looking for it takes a third of the time
    for each in sys.argv[3:]:
        importlib.import_module(each)
    gc.freeze()
    gc.enable()
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
