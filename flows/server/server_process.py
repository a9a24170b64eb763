"""A Prefect server that ends with the process that started it: ``python -m flows.server.server_process DESCRIPTOR``.

The process that starts it (``flows.server.prefect_server``) puts Prefect's settings into the environment, and passes
the socket that the server listens on.
"""

import logging
import signal
import socket
import sys

from infra.node.processes import die_with_parent


def serve(listening: socket.socket) -> None:
    """Serve API, UI and scheduler on a bound socket until SIGTERM."""
    import uvicorn
    from prefect.server.api.server import create_app

    config = uvicorn.Config(create_app(), log_level=logging.WARNING, timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listening])


def main() -> None:
    """Serve on the inherited socket."""
    die_with_parent(signal.SIGKILL)
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        serve(listening)


if __name__ == "__main__":
    main()
