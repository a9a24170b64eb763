"""A Prefect server that ends with the process that started it: ``python -m flows.serve HOST PORT``.

The process that starts it (``flows.prefect_server``) sets Prefect's settings in the environment.
"""

import logging
import signal
import socket
import sys

from infra.processes import die_with_parent


def serve(listening: socket.socket) -> None:
    """Serve API, UI and scheduler on a bound socket until SIGTERM."""
    import uvicorn
    from prefect.server.api.server import create_app

    config = uvicorn.Config(create_app(), log_level=logging.WARNING, timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listening])


def main() -> None:
    """Bind before the long imports, so that a port in use is told at once."""
    die_with_parent(signal.SIGKILL)
    host, port = sys.argv[1], int(sys.argv[2])
    with socket.create_server((host, port)) as listening:
        serve(listening)


if __name__ == "__main__":
    main()
