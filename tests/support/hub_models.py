"""A local Hub with one model, asked by processes of their own, as its client reads its URL on import."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.hub_server import Hub, HubSite, running_site
from tests.support.hub_texts import environment
from tests.support.prepared_python import prepared_python

REPOSITORY = "someone/t5"
START = f"hf://{REPOSITORY}"


@contextmanager
def prepared_site(folder: Path, modules: Sequence[str]) -> Iterator[tuple[HubSite, str]]:
    """Yield a server, and a Python that has imported modules and asks this server."""
    with running_site() as site:
        variables = {"HF_ENDPOINT": site.url, "HF_HOME": str(folder / "hf-home")}
        with prepared_python(folder, [*modules, "huggingface_hub.hf_api"], variables) as python:
            yield site, python


def model_hub(files: dict[str, bytes]) -> Hub:
    return Hub(files, REPOSITORY, kind="models")


def printed_by(code: str, hub: Hub, root: Path, *arguments: str, **variables: str) -> str:
    """What a process prints."""
    command, settings = [sys.executable, "-c", code, *arguments], environment(hub, root, **variables)
    made = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=100, check=False)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()
