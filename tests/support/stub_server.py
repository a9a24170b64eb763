"""The server of ``t5-pretrain serve`` in a process of its own, with a stub in place of the model.

The stub answers with the text in capitals. It holds a text that is the path of a file until that file exists or nobody
waits for its batch, fails at "fail", and writes what it decodes into a file, a batch on each line.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from flows.server.prefect_server import listening
from infra.node.ports import free_port
from t5train.inference.serve import http_server
from t5train.inference.serve.access import KEY_VARIABLE, Access
from t5train.inference.serve.application import application
from t5train.inference.serve.limits import Limits
from t5train.inference.serve.question import Question
from t5train.inference.serve.text_queue import Asked, TextQueue
from t5train.inference.text.decoding import GenerationSpec
from t5train.inference.text.generation import Generated

ROOT = Path(__file__).parents[2]


class StubServer(NamedTuple):
    """A running server."""

    url: str
    folder: Path
    process: "subprocess.Popen[str]"

    def ask(self, text: str | list[str], **more: Any) -> httpx.Response:
        """Ask for an answer, and wait for it."""
        return httpx.post(f"{self.url}/generate", json={"text": text}, timeout=600, **more)

    def waiting(self) -> int:
        """How many texts wait."""
        return int(httpx.get(f"{self.url}/health", timeout=600).json()["waiting_texts"])

    def hold(self, name: str) -> str:
        """Return a text that is held until the file of its name exists."""
        return str(self.folder / name)

    def decoded(self) -> list[list[str]]:
        """The batches that were decoded, or are."""
        file = self.folder / "decoded"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@contextmanager
def stub_server(folder: Path, key: str | None = None, **limits: float) -> Iterator[StubServer]:
    """Run a server on loopback with these limits, until the end of the block."""
    port = free_port()
    command = [sys.executable, "-m", "tests.support.stub_server", str(port), str(folder), json.dumps(limits)]
    environment = os.environ | ({KEY_VARIABLE: key} if key else {})
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield StubServer(f"http://127.0.0.1:{port}", folder, process)
        finally:
            process.kill()


class _Stub:
    tasks = ("a<b", "en-de")

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def asked(self, question: Question) -> list[Asked]:
        return [Asked(text, question.spec(1)) for text in question.text]

    def decode(self, texts: Sequence[str], _: GenerationSpec, is_wanted: Callable[[], bool]) -> list[Generated]:
        with open(self._folder / "decoded", "a", encoding="utf-8") as file:
            file.write(f"{json.dumps(texts)}\n")
        for text in texts:
            if text == "fail":
                raise ValueError("as it was told to")
            while text.startswith(str(self._folder)) and not Path(text).exists() and is_wanted():
                time.sleep(0.01)
        return [Generated(text, {}, text.upper(), text, 1, 1, True, ()) for text in texts]


def main() -> None:
    port, folder, limits = int(sys.argv[1]), Path(sys.argv[2]), Limits(**{"input_tokens": 9} | json.loads(sys.argv[3]))
    stub = _Stub(folder)
    queue = TextQueue(stub.decode, limits.batch_sequences, limits.waiting_texts)
    with listening(port) as bound, queue:
        print("ready", flush=True)  # noqa: T201 - for the process that started this one
        app = application(stub, queue, Access.of(None, is_loopback=True), limits)
        http_server.serve(app, bound, limits.read_seconds, limits.answer_seconds)


if __name__ == "__main__":
    main()
