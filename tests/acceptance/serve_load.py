"""Serve a model to many clients at once, and compare each answer with that of `t5-pretrain generate`.

::

    python -m tests.acceptance.serve_load [--clients 64] [--seconds 120] [--model FOLDER] [--into JSON]

Each client sends one request after another: one to three of 30 texts of various lengths, with one of three settings.
Every request must be answered, in the order of its texts, with exactly the answers that each text gets alone. Meanwhile
three more clients send 10 MB, a request that never ends, and a wrong key, and must be refused in one line. Then SIGTERM
must end the server. The model has random weights unless a folder is given.
"""

import argparse
import asyncio
import os
import random
import secrets
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.measured_conditions import commit
from benchmarks.measured_result import Figure, Result, add_into
from infra.node.ports import free_port
from t5train.inference.serve.access import KEY_VARIABLE
from t5train.inference.text.decoding import GenerationSpec
from t5train.inference.text.generation import generate
from t5train.release.export import export
from tests.support.hardware import hardware
from tests.support.synthetic_models import make_trained

TEXTS, SEED = 30, 0
SETTINGS = (
    {"max_new_tokens": 8},
    {"max_new_tokens": 8, "num_beams": 2},
    {"max_new_tokens": 4, "num_beams": 3},
)
Answers = Mapping[tuple[str, int], Mapping[str, Any]]
"""What each text is answered with, for each place in SETTINGS."""


@dataclass
class Load:
    """What the clients have seen."""

    latencies: list[float] = field(default_factory=list)
    """Seconds of each request that was answered."""
    texts: int = 0
    wrong: list[str] = field(default_factory=list)
    """Answers that are not those of a text alone, and requests that failed."""
    refusals: list[str] = field(default_factory=list)
    """One line for each client that must be refused."""

    def row(self, clients: int, seconds: float) -> dict[str, Figure]:
        """Return what is measured."""
        slowest = sorted(self.latencies)[int(0.99 * len(self.latencies))]
        return {
            "clients": clients,
            "seconds": seconds,
            "requests": len(self.latencies),
            "texts": self.texts,
            "texts a second": round(self.texts / seconds),
            "median latency, s": round(statistics.median(self.latencies), 2),
            "99th percentile, s": round(slowest, 2),
            "wrong or refused": len(self.wrong),
        }


def made_texts() -> list[str]:
    """Texts of at most 64 tokens with one or two gaps."""
    draw = random.Random(SEED)
    words = ("a", "list", "of", "names", "is", "the", "value", "that", "returns", "object", "method", "class")
    return [
        f"{' '.join(draw.choices(words, k=draw.randint(1, 20)))} <extra_id_0>{' and <extra_id_1>' * draw.randint(0, 1)}"
        for _ in range(TEXTS)
    ]


def answers_alone(folder: Path, texts: Sequence[str]) -> Answers:
    """Generate for each text alone, with each of SETTINGS."""
    return {
        (result.text, place): result._asdict() | {"remarks": list(result.remarks)}
        for place, settings in enumerate(SETTINGS)
        for result in generate(folder, texts, GenerationSpec(**settings), "cpu")
    }


@contextmanager
def served(folder: Path, key: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Run the command on a folder. Yields the URL and the process."""
    port = str(free_port())
    command = [sys.executable, "-m", "flows.cli", "serve", str(folder), "--port", port, "--device", "cpu"]
    environment = os.environ | {KEY_VARIABLE: key}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = [process.stdout.readline() for _ in range(2)]
            assert f"is served at http://127.0.0.1:{port}" in said[1], said
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.kill()


async def _client(http: httpx.AsyncClient, number: int, answers: Answers, load: Load, end: float) -> None:
    draw, texts = random.Random(f"{SEED} {number}"), made_texts()
    while time.monotonic() < end:
        place, asked = draw.randrange(len(SETTINGS)), draw.sample(texts, draw.randint(1, 3))
        began = time.monotonic()
        response = await http.post("/generate", json={"text": asked, **SETTINGS[place]})
        load.latencies.append(time.monotonic() - began)
        load.texts += len(asked)
        found = response.json().get("answers")
        if found != [answers[text, place] for text in asked]:
            load.wrong.append(f"{SETTINGS[place]} {asked}: {response.text}")


async def _refused(http: httpx.AsyncClient, url: str, load: Load) -> None:
    """Send what must be refused."""
    wrong_key = await http.post("/generate", json={"text": "a"}, headers={"Authorization": "Bearer wrong"})
    too_large = await http.post("/generate", json={"text": "a" * 10_000_000})
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\n")
    slow = (await reader.read()).decode()
    writer.close()
    load.refusals += [f"{each.status_code} {each.text}" for each in (wrong_key, too_large)]
    load.refusals.append(f"{slow.split()[1]} {slow.rpartition(chr(10))[2]}")


async def put_under_load(url: str, key: str, answers: Answers, clients: int, seconds: float) -> Load:
    """Let clients ask for so many seconds, and three more send what must be refused."""
    load, end = Load(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as http:
        every = [_client(http, number, answers, load, end) for number in range(clients)]
        await asyncio.gather(*every, _refused(http, url, load))
    return load


def run(folder: Path, clients: int, seconds: float) -> Load:
    """Serve a folder under load, and end the server. What is wrong, its end included, is in the result."""
    key, answers = secrets.token_hex(16), answers_alone(folder, made_texts())
    with served(folder, key) as (url, process):
        load = asyncio.run(put_under_load(url, key, answers, clients, seconds))
        process.send_signal(signal.SIGTERM)
        if (code := process.wait(600)) != 128 + signal.SIGINT:
            load.wrong.append(f"the server ended with {code}")
    if [each.partition(" ")[0] for each in load.refusals] != ["401", "413", "408"]:
        load.wrong.append(f"not refused: {load.refusals}")
    return load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--model", type=Path, help="folder of a T5; random weights if left out")
    add_into(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        folder = options.model or export(*make_trained(made / "made"), made / "model").path
        load = run(folder, options.clients, options.seconds)
    Result(
        what="A served model under load",
        command=f"python -m tests.acceptance.serve_load {shlex.join(sys.argv[1:])}".rstrip(),
        commit=commit(),
        machine=hardware(),
        notes=f"Load average {os.getloadavg()[0]:.1f}. Refused: {'; '.join(load.refusals + load.wrong[:5])}",
        rows=[load.row(options.clients, options.seconds)],
    ).show(options.into)
    return 1 if load.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
