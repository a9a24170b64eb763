"""How all processes of Dask in a run are set up: TLS with the run's credentials, and no other open port.

Dask executes whatever code a client sends, so every connection is encrypted and both sides must present the run's
certificate.
"""

import logging
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Security

_NOWHERE = "/dev/null/none"  # no file can have this name
_LEASES = 5
"""After so many leases without a heartbeat the scheduler gives up a worker whose connection is still open. Not one: the
scheduler counts the time for which it was itself stopped, too."""
_MIN_TCP_SECONDS = 12  # Dask refuses less than its number of probes and one


@dataclass(frozen=True)
class Credentials:
    """The certificate of a run, which is its own authority, and its private key, both as PEM.

    Whoever holds the key belongs to the run. It is sent on stdin only, and never printed.
    """

    certificate: str
    key: str = field(repr=False)


def unconfigured(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which the import of Dask finds no variables and files of the user or of the machine."""
    kept = {name: value for name, value in environment.items() if not name.startswith("DASK_")}
    return kept | {"HOME": _NOWHERE, "DASK_CONFIG": _NOWHERE, "DASK_ROOT_CONFIG": _NOWHERE}


@contextmanager
def unconfigured_import() -> Iterator[None]:
    """In the block, the environment of this process is ``unconfigured``."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(unconfigured(before))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def configure(lease_seconds: float) -> None:
    """Set Dask up for this process: from its defaults, not from configuration files and variables of the user.

    These could start programs (``preload``) and open ports. A peer is given up after ``lease_seconds`` without contact.
    """
    import dask
    import distributed  # adds its defaults to those of dask

    dask.config.refresh(paths=[], env={})
    logging.getLogger(distributed.__name__).setLevel(logging.ERROR)  # losses are reported by the head
    dask.config.set(
        {
            "distributed.comm.require-encryption": True,
            "distributed.comm.timeouts.tcp": f"{max(lease_seconds, _MIN_TCP_SECONDS)} s",
            "distributed.diagnostics.nvml": False,
            "distributed.scheduler.worker-ttl": f"{_LEASES * lease_seconds} s",
            "distributed.scheduler.work-stealing": False,  # it would give a shard back to a host that failed at it
            "distributed.scheduler.worker-saturation": 1.0,  # shards wait on the head until a process is free
            "distributed.scheduler.http.routes": [],
            "distributed.worker.http.routes": [],
            "distributed.worker.profile.enabled": False,
        }
    )


def security(credentials: Credentials) -> "Security":
    """Return what makes Dask refuse every peer that does not hold the run's key."""
    from distributed import Security

    own = {"cert": credentials.certificate, "key": credentials.key}
    files = {f"tls_{role}_{what}": text for role in ("client", "scheduler", "worker") for what, text in own.items()}
    return Security(
        require_encryption=True,
        tls_ca_file=credentials.certificate,
        tls_min_version=ssl.TLSVersion.TLSv1_3,
        **files,
    )


def without_http(server: type[Any]) -> type[Any]:
    """Return a class of servers of Dask that do not open a port for HTTP, which would have no TLS."""
    return type(server.__name__, (server,), {"start_http_server": lambda *_, **__: None})
