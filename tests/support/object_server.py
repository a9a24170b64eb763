"""A SeaweedFS server that only this machine can reach. It can be killed and started again with what it has stored."""

import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.node.ports import free_port
from tests.support.small_disk import NAMESPACE

BUCKET = "models"
_WEED = Path(sys.executable).with_name("weed")
_SERVICES = ("s3", "master", "filer", "volume", "admin")
_START_SECONDS = 180
_DIE_WITH_PARENT = """
import os, signal, sys
from infra.node.processes import die_with_parent

die_with_parent(signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""


class ObjectServer:
    """A server that speaks S3, with an empty bucket. Credentials stored on this machine are not used."""

    def __init__(self, folder: Path, disk_bytes: int | None = None, address: str = "127.0.0.1") -> None:
        """``folder`` is for the server's data. With ``disk_bytes``, only the server has a disk of this size there."""
        self.url = f"s3://{BUCKET}"
        self._folder, self._disk_bytes, self._address = folder, disk_bytes, address
        self._ports = {f"{service}.{port}": free_port() for service in _SERVICES for port in ("port", "port.grpc")}
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://{address}:{self._ports['s3.port']}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": f"key-{secrets.token_hex(8)}",
            "AWS_SECRET_ACCESS_KEY": f"secret-{secrets.token_hex(16)}",
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        """Environment variables that S3 clients read: endpoint and credentials."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """The port that S3 clients connect to."""
        return self._ports["s3.port"]

    @property
    def disk(self) -> Path:
        """The server's data folder. It can also be reached if the disk is mounted for the server only."""
        assert self._process is not None
        return Path("/proc", str(self._process.pid), "root", *self._folder.parts[1:])

    @property
    def command(self) -> list[str]:
        """The command that runs the server."""
        return [str(_WEED), "mini", *self._options()]

    def start(self) -> None:
        """Start the server, and wait until it has its bucket."""
        command = self.command
        if self._disk_bytes is not None:
            mount = f"mount -t tmpfs -o size={self._disk_bytes} tmpfs {shlex.quote(str(self._folder))}"
            command = ["/usr/bin/env", *NAMESPACE, "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
        log = self._folder.with_name(f"{self._folder.name}.log")
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _DIE_WITH_PARENT, *command],
                env={**os.environ, **self.environment, "TMPDIR": str(self._folder)},
                stdout=output,
                stderr=output,
            )
        self._await_bucket(self._process, log)

    def kill(self) -> None:
        """End the server as a crash would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        for port in self._ports.values():
            # SeaweedFS ignores TMPDIR for its sockets.
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # noqa: S108 - SeaweedFS chooses this folder
                left.unlink()

    def _options(self) -> list[str]:
        """Listen at one address only, without telemetry and without services other than S3."""
        options = {"dir": self._folder, "bucket": BUCKET, "ip": self._address, "ip.bind": self._address, **self._ports}
        options |= {"s3.port.iceberg": 0, "s3.port.lance": 0}
        off = ("master.telemetry", "admin.ui", "webdav", "s3.autoCreateBucket")
        return [f"-{name}={value}" for name, value in options.items()] + [f"-{name}=false" for name in off]

    def _await_bucket(self, server: subprocess.Popen[bytes], log: Path) -> None:
        from s3fs import S3FileSystem

        client = S3FileSystem(
            key=self.environment["AWS_ACCESS_KEY_ID"],
            secret=self.environment["AWS_SECRET_ACCESS_KEY"],
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            config_kwargs={"retries": {"max_attempts": 0}},
            skip_instance_cache=True,
        )
        deadline = time.monotonic() + _START_SECONDS
        while not client.exists(self.url):
            alive = server.poll() is None and time.monotonic() < deadline
            assert alive, f"no object store: {log.read_text('utf-8', 'replace')[-2000:]}"


@contextmanager
def running_server(folder: Path, disk_bytes: int | None = None) -> Iterator[ObjectServer]:
    """Run a server whose data are in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    server = ObjectServer(folder, disk_bytes)
    try:
        server.start()
        yield server
    finally:
        server.kill()
