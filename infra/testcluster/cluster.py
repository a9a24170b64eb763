"""A cluster: the hosts ``head``, ``node0``, ``node1`` ... on their own network, and ways to make them fail."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

from infra.node import processes
from infra.node.processes import ProcessIdentity
from infra.testcluster import host_files, namespaces, registry
from infra.testcluster.host import Host, Process
from infra.testcluster.namespaces import HEAD
from infra.testcluster.registry import State
from t5train.errors import TestClusterError


class Cluster:
    """A running cluster. Its hosts share nothing except one folder, if any."""

    def __init__(self, name: str) -> None:
        """Find the cluster of that name. Raises TestClusterError if there is none."""
        self.name, self._state = name, registry.read(name)
        self.nodes = [f"node{number}" for number in range(self._state.nodes)]
        self.hosts = [HEAD, *self.nodes]
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    def up(cls, name: str, nodes: int = 2, share: Path | None = None, temporary: bool = False) -> Self:
        """Start a head and ``nodes`` more hosts on this machine, as namespaces. They run until ``down``.

        A ``temporary`` cluster also ends when the calling thread ends. If ``share`` is given, every host can read and
        write that folder of this machine, at the same path; otherwise the hosts share no folder.

        Raises:
            TestClusterError: this machine cannot run several hosts, or the name is taken.

        """
        if missing := namespaces.what_is_missing():
            raise TestClusterError(f"this machine cannot run a test cluster: {missing}")
        if not 1 <= nodes <= namespaces.MOST_NODES:
            raise TestClusterError(f"{nodes} nodes were requested: a test cluster has 1 to {namespaces.MOST_NODES}")
        if share and not share.is_dir():
            raise TestClusterError(f"{share} is not a folder, so hosts cannot share it: create it first")
        shared = str(share.resolve()) if share else None
        creator = ProcessIdentity.of(os.getpid())
        registry.create(name, State(nodes, shared, temporary, host_files.environment(), creator))
        cluster = cls(name)
        try:
            cluster._start()
        except BaseException:
            cluster.down()
            raise
        return cluster

    @classmethod
    @contextmanager
    def temporary(cls, name: str, nodes: int = 2, share: Path | None = None) -> Iterator[Self]:
        """Run a cluster in a ``with`` block. It also ends when the calling thread ends, even if that is killed."""
        cluster = cls.up(name, nodes, share, temporary=True)
        try:
            yield cluster
        finally:
            cluster.down()

    def hostfile(self, slots: int = 1) -> str:
        """A hostfile of all nodes, in DeepSpeed's format."""
        return "".join(f"{node} slots={slots}\n" for node in self.nodes)

    def address(self, host: str) -> str:
        """The host's address on the cluster's network."""
        return namespaces.address(self.host(host).name)

    def host(self, name: str) -> Host:
        """A host by its name. Raises TestClusterError if the cluster has none of that name."""
        if name not in self.hosts:
            raise TestClusterError(f"there is no host {name!r}: use one of {' '.join(self.hosts)}")
        return Host(name, self.name)

    def disk(self, host: str, path: str) -> Path:
        """The path on this machine of the file ``path`` on a host's own disk."""
        return self.host(host).disk / path.removeprefix("/")

    def exec(
        self, host: str, argv: list[str], environment: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a host as from its console, not over ssh, and wait for it; ``timeout`` is in seconds."""
        command, variables = self.host(host).command(argv), self._state.environment | dict(environment or {})
        return subprocess.run(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(
        self,
        host: str,
        argv: list[str],
        output: int | IO[Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program on a host. Signals to the returned process do not reach it; ``processes`` has its pid."""
        command, variables = self.host(host).command(argv), self._state.environment | dict(environment or {})
        return subprocess.Popen(command, env=variables, stdout=output, stderr=output)

    def processes(self, host: str) -> list[Process]:
        """The processes on a host, including its sshd."""
        return self.host(host).processes()

    def boot(self, host: str, new_disk: bool = False) -> None:
        """Boot a host again, with its old disk or a new one."""
        self._boot([host], new_disk)

    def power_cut(self, host: str) -> None:
        """End a host without notice to the others: unplug its cable, then kill every process at once."""
        init = self.host(host).init
        if init is None:
            return
        namespaces.unplug(self._switch, host)
        left = processes.end(lambda pid: pid == init.pid and init.is_alive(), grace_seconds=0)
        if left:
            raise TestClusterError(f"{host} cannot be ended: process {init.pid} survived SIGKILL")
        if started := self._started.pop(host, None):
            started.wait()

    def set_link(self, host: str, state: str) -> None:
        """Unplug a host's cable (``down``) or plug it back in (``up``)."""
        namespaces.set_link(self._switch, self.host(host).name, state)

    def set_rate(self, host: str, rate: str | None) -> None:
        """Limit a host's network link, in each direction, for example to ``200mbit``. None removes the limit."""
        namespaces.set_rate(self._switch, host, self.host(host).running(), rate)

    def stop_sshd(self, host: str) -> None:
        """Make a host refuse new ssh connections; open ones stay open."""
        self.exec(host, ["pkill", "--pidfile", "/run/sshd.pid"]).check_returncode()

    def start_sshd(self, host: str) -> None:
        """Make a host accept ssh connections again."""
        self.exec(host, host_files.START).check_returncode()

    def rekey(self, host: str, trusted: bool = False) -> None:
        """Give a host a new host key, which becomes known to the head only if it is ``trusted``."""
        host_files.make_key(self.host(host).etc / "host_key")
        self.stop_sshd(host)
        self.start_sshd(host)
        if trusted:
            self._tell_host_keys()

    def down(self) -> None:
        """End every process, and remove the folder with all disks."""
        registry.end(self.name)
        for process in self._started.values():
            process.wait()

    @property
    def _switch(self) -> ProcessIdentity:
        return registry.read_switch(self.name)

    @property
    def _user_key(self) -> Path:
        return registry.folder(self.name) / "user_key"

    def _start(self) -> None:
        host_files.make_key(self._user_key)
        folder = registry.folder(self.name) / "switch"
        folder.mkdir()
        argv = ["sh", "-c", "echo ready; exec sleep infinity"]
        self._started["switch"] = process = namespaces.start(
            self.name, namespaces.SWITCH, argv, b"", folder / "console"
        )
        namespaces.await_ready(process, folder / "console")  # only then is its network separate from the machine's
        registry.write_switch(self.name, ProcessIdentity.of(process.pid))
        namespaces.make_switch(self._switch)
        self._boot(self.hosts)

    def _boot(self, names: list[str], new_disk: bool = False) -> None:
        for name in names:
            host = self.host(name)
            if host.init:
                raise TestClusterError(f"{name} is already running")
            if new_disk:
                host.remove_disk()
            host.make(self._user_key, self.hosts)
            self._started[name] = host.switch_on(self._state.share)
        for name in names:
            namespaces.plug(self._switch, name, self.host(name).await_ready(self._started[name]))
            self.start_sshd(name)
        if HEAD in names:
            host_files.write_client(self.host(HEAD).disk, self._user_key)
            self._tell_host_keys()
            self.disk(HEAD, host_files.HOSTFILE).write_text(self.hostfile(), "utf-8")

    def _tell_host_keys(self) -> None:
        keys = {name: self.host(name).etc / "host_key" for name in self.hosts}
        host_files.write_known_hosts(self.host(HEAD).disk, keys)
