"""``board``: TensorBoard for the runs under a root."""

import getpass
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Annotated

import typer

from flows.cli.interruption import interrupt_on_stop
from flows.cli.options import RootOption, root_of, runs_like
from flows.cli.terminal import complain, say
from flows.process_start import await_start, failure
from flows.server.prefect_server import stop
from infra.head.runs.run_lookup import find_run
from t5train.errors import InputError, LaunchError
from t5train.files.run_folder import RUNS, TENSORBOARD

_ADDRESS = "127.0.0.1"
_LOOK_SECONDS, _END_SECONDS = 0.2, 5.0


def board(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="Show only this run: its name, or folder", autocompletion=runs_like),
    ] = None,
    root: RootOption = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of TensorBoard, on this machine only")] = 6006,
) -> None:
    """Show the metrics of all runs under a root in TensorBoard, or those of RUN, until Ctrl-C.

    Runs that start later appear, too. Only this machine can connect; from another one, use the ssh command it prints.

    $ t5-pretrain board
    $ t5-pretrain board mine --root /data/t5
    $ t5-pretrain board --port 6007
    """
    folder = _log_folder(root_of(root), run)
    if find_spec("tensorboard") is None:
        raise InputError(
            f"tensorboard is not installed. Install it: {sys.executable} -m pip install 'tensorboard>=2.19,<3'"
        )
    _require_free(port)
    interrupt_on_stop()  # which ends TensorBoard, too
    with TemporaryFile() as output, _tensorboard(folder, port, output) as process:
        try:
            _await_start(process, port, output)
            say(f"TensorBoard shows {folder} at http://{_ADDRESS}:{port}; Ctrl-C stops it")
            say("To open it from another machine, type there, then open the same address:")
            say(f"    ssh -N -L {port}:{_ADDRESS}:{port} {getpass.getuser()}@{socket.gethostname()}")
            process.wait()
        except KeyboardInterrupt:
            complain("TensorBoard has stopped")
            return
        raise LaunchError(failure(process, "TensorBoard", output))


def _log_folder(root: Path, run: str | None) -> Path:
    """Return the folder for TensorBoard to read. Raises InputError if it has no metrics."""
    if run is not None:
        folder = find_run(root, run) / TENSORBOARD
        if not folder.is_dir():
            raise InputError(f"run {folder.parent.name} has no metrics yet: its training has not begun")
        return folder
    folder = root / RUNS
    if not any(folder.glob(f"*/{TENSORBOARD}")):
        raise InputError(f"there are no runs with metrics in {folder}. Start a run, or give another --root")
    return folder


def _require_free(port: int) -> None:
    try:
        socket.create_server((_ADDRESS, port)).close()
    except OSError as error:
        raise InputError(
            f"port {port} of {_ADDRESS} cannot be used: {error.strerror}. Choose another one with --port"
        ) from error


@contextmanager
def _tensorboard(folder: Path, port: int, output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Run TensorBoard within the block, in a session of its own, so that Ctrl-C reaches this process only."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)]
    command += ["--host", _ADDRESS, "--port", str(port)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield process
    finally:
        stop(process, _END_SECONDS)


def _await_start(process: subprocess.Popen[bytes], port: int, output: IO[bytes]) -> None:
    """Wait until TensorBoard listens. Raises LaunchError if it ends or hangs."""

    def listens() -> bool:
        try:
            socket.create_connection((_ADDRESS, port), _LOOK_SECONDS).close()
        except OSError:
            return False
        return True

    await_start(process, "TensorBoard", listens, output)
