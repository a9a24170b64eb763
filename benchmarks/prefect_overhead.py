"""Measure what Prefect adds to the stages of recipe ``smoke``.

    python -m benchmarks.prefect_overhead [--rounds 3] [--port 4299] [--set optimizer.num_steps=100]

Each round times three runs, one after the other, on a root whose text, tokenizer and shards exist already: the bare
stages, called by a Python process that does not import Prefect; ``t5-pretrain run`` with the running server of
``t5-pretrain up``; and a run of the deployment, which counts from its state Running to its end. All three verify the
data, train, consolidate, export, certify and publish. The deployment is compared with the bare stages without their
start of Python, because its own comes before Running. "Added" is the median difference to the bare stages of the same
round, "ratio" the median quotient.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.measured_result import Figure, add_into, measured_here, spread
from flows.server.prefect_server import HOME
from tests.support import prefect_servers

BARE = """
import sys
import time
from pathlib import Path

from infra.head.preflight.run_checks import publish_url
from infra.head.training_run import hold_ready_run, train_run
from t5train.checkpoint.consolidate import consolidate
from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.data.vocabulary.tokenizer import build_tokenizer
from t5train.files import run_folder
from t5train.progress import silent
from t5train.release.certification import certify_in_fresh_process
from t5train.release.export import export
from t5train.release.publication import publish
from t5train.spec.recipes import recipe

began = time.monotonic()
root, name, *settings = sys.argv[1:]
spec = recipe("smoke").with_settings(dict(each.split("=", 1) for each in settings))
spec = spec.with_settings({"storage.root": root, "name": name})
root = Path(root)
with hold_ready_run(spec, None) as run:
    corpus = build_corpus(spec.corpus, root, silent)
    tokenizer = build_tokenizer(spec.tokenizer, spec.corpus, corpus, root, silent)
    shards = build_shards(spec.shards, spec.corpus, corpus, tokenizer, root, silent)
    checkpoint = train_run(spec, shards, run, silent)
    checkpoints, out = run.folder / run_folder.CHECKPOINTS, run.folder / run_folder.WEIGHTS / "bare"
    weights = consolidate(checkpoints, out, tag=checkpoint.tag, progress=silent)
    witness = run.folder / run_folder.WITNESS_FOLDER
    exported = export(weights, tokenizer, witness, spec, run.folder / run_folder.EXPORT, silent)
    publish(certify_in_fresh_process(exported, witness, silent), publish_url(spec), silent)
assert "prefect" not in sys.modules
print(time.monotonic() - began)
"""
_PROGRAM = [str(Path(sys.executable).with_name("t5-pretrain"))]


class Measured:
    """A root with the data, and the server and the worker of ``up``."""

    def __init__(self, root: Path, port: int, settings: list[str]) -> None:
        self._root, self._settings = root, settings
        self._api_url = f"http://127.0.0.1:{port}/api"
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        self.environment |= {"PREFECT_HOME": str(root / "user")}

    @contextmanager
    def up(self, port: int) -> Iterator[None]:
        """Run the server and a worker within the block."""
        command = [*_PROGRAM, "up", "--root", str(self._root), "--port", str(port)]
        with subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            while "their defaults" not in (line := process.stdout.readline()):
                assert line, "`t5-pretrain up` ended"
            try:
                yield
            finally:
                process.terminate()

    def bare(self, name: str) -> tuple[float, float]:
        """Seconds of the stages without Prefect, with and without the start of Python."""
        seconds, printed = self._timed([sys.executable, "-c", BARE, str(self._root), name, *self._settings])
        return seconds, float(printed)

    def run(self, name: str) -> float:
        """Seconds of ``t5-pretrain run``."""
        settings = [part for each in self._settings for part in ("--set", each)]
        command = [*_PROGRAM, "run", "smoke", "--root", str(self._root), "--name", name, *settings]
        return self._timed(command)[0]

    def deployment(self, name: str) -> float:
        """Seconds of a run of the deployment, from Running to its end."""
        (smoke,) = self._ask("deployments/filter", {"deployments": {"name": {"any_": ["smoke"]}}})
        settings = {key: json.loads(value) for key, _, value in (each.partition("=") for each in self._settings)}
        parameters = {"run_name": name, "settings": settings}
        run = self._ask(f"deployments/{smoke['id']}/create_flow_run", {"parameters": parameters})["id"]
        while (found := self._ask(f"flow_runs/{run}", {}, "GET"))["end_time"] is None:
            time.sleep(1)
        assert found["state_type"] == "COMPLETED", found["state"]
        began, ended = (datetime.fromisoformat(found[each]) for each in ("start_time", "end_time"))
        return (ended - began).total_seconds()

    def _timed(self, command: list[str]) -> tuple[float, str]:
        began = time.monotonic()
        result = subprocess.run(command, env=self.environment, check=True, stdout=subprocess.PIPE, text=True)
        return time.monotonic() - began, result.stdout

    def _ask(self, path: str, body: object, method: str = "POST") -> Any:
        return prefect_servers.ask(self._root / HOME, f"{self._api_url}/{path}", body, method)


def main() -> None:
    """Print the times of each round, and what Prefect adds."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--port", type=int, default=4299)
    arguments.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", dest="settings")
    add_into(arguments)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = Measured(Path(folder), given.port, given.settings)
        measured.bare("data")
        with measured.up(given.port):
            rounds: list[tuple[float, ...]] = []
            for each in range(given.rounds):
                bare, run = measured.bare(f"bare-{each}"), measured.run(f"run-{each}")
                rounds.append((*bare, run, measured.deployment(f"deployed-{each}")))
                print(f"round {each + 1}: {rounds[-1]}", file=sys.stderr, flush=True)
    notes = f"{given.rounds} rounds; text, tokenizer and shards exist already. Next to `run`, bare stages include the "
    notes += "start of Python."
    measured_here("What Prefect adds to a run of smoke", compared(rounds), notes).show(given.into)


def compared(rounds: Sequence[tuple[float, ...]]) -> list[dict[str, Figure]]:
    """Return what `run` and a deployment take, next to bare stages with and without the start of Python."""
    return [
        {
            "run": name,
            "seconds": spread([each[number] for each in rounds], 1),
            "seconds of bare stages": spread([each[bare] for each in rounds], 1),
            "added, s": spread([each[number] - each[bare] for each in rounds], 1),
            "ratio": round(statistics.median(each[number] / each[bare] for each in rounds), 2),
        }
        for number, bare, name in (
            (2, 0, "t5-pretrain run, with a running server"),
            (3, 1, "deployment, from Running"),
        )
    ]


if __name__ == "__main__":
    main()
