"""Fixtures and switches that every test may use."""

import atexit
import fcntl
import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Literal
from zlib import crc32

import pytest
from hypothesis import settings

from infra.node import ports
from infra.node.attempts.rank_environment import search_path
from infra.node.operator_folder import VARIABLE, operator_folder
from infra.testcluster import namespaces
from t5train.checkpoint import sidecar
from t5train.checkpoint.sidecar import DataState, ParallelLayout, Sidecar
from t5train.model.parameters import ParameterSlot
from t5train.records.digests import digest_files
from tests.support import prefect_servers
from tests.support.object_server import ObjectServer, running_server
from tests.support.prepared_python import STAGES, prepared_python

# Put this Python's ninja first, as ranks do: with another ninja, operators are compiled again, which takes minutes.
os.environ["PATH"] = search_path()
# Without a GPU, Triton interprets kernels. It has to know before its first import.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"
# A shell's background job ignores Ctrl-C, and so would every process that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Let tests that start ranks by themselves use the operators that `make setup` compiled.
os.environ[VARIABLE] = str(operator_folder())
# A port that is free may be another's before a server of a test has it, so workers of pytest share out all ports.
ports._CANDIDATES = ports._CANDIDATES[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8 :: 8]

pytest_plugins = ["tests.support.durations"]
_OF_RANKS = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
Make = Callable[[Path], object]
GOLDEN = Path(__file__).parent / "golden"

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kill-rounds", type=int, default=1, help="rounds of tests that kill or race processes")
    parser.addoption("--kill-variant", default="zero1", help="what tests/flows/test_kill.py trains")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in random order")
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew instead of comparing")


def pytest_collection() -> None:
    """Import all test files without looking for garbage, which takes a third of the time and finds next to none."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()  # modules stay: neither tests nor their forks look through them again, nor pytest when it ends
    gc.enable()
    atexit.register(gc.unfreeze)  # or Triton would report everything as leaked


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked gpu or cluster, with the reason, if this machine cannot run them; put the slow files first.

    Tests are shuffled instead if that is asked for.
    """
    if (seed := config.getoption("--shuffle")) is not None:
        _shuffle(items, Random(seed))
    else:
        _put_slow_files_first(items)
    for marker, missing in (("gpu", _why_no_accelerator), ("cluster", namespaces.what_is_missing)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and (reason := missing()):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))


def _put_slow_files_first(items: list[pytest.Item]) -> None:
    """Then no worker has a long file left when the others have none.

    Folders take turns, because files of some mostly wait for servers, and those of others compute.
    """
    slow = dict.fromkeys(item.path for item in items if item.get_closest_marker("slow"))
    counts = defaultdict[str, Iterator[int]](itertools.count)
    turns = {path: next(counts[path.relative_to(GOLDEN.parent).parts[0]]) for path in slow}
    items.sort(key=lambda item: turns.get(item.path, len(slow)))


def _shuffle(items: list[pytest.Item], random: Random) -> None:
    """Shuffle files, and tests within each, so that tests of a file still share its fixtures."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    shuffled = list(files.values())
    random.shuffle(shuffled)
    for tests in shuffled:
        random.shuffle(tests)
    items[:] = [item for tests in shuffled for item in tests]


def _why_no_accelerator() -> str | None:
    import torch

    return None if torch.accelerator.is_available() else "no accelerator on this machine"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare text with a file of tests/golden; ``pytest --update-golden`` writes it instead."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, "utf-8")
        assert text == path.read_text("utf-8"), f"{path} differs; if that is meant, run pytest --update-golden"

    return compare


@pytest.fixture
def record_only_rank() -> Callable[..., None]:
    """``record_only_rank(tag, names, slots, zero_stage=0)`` writes the sidecar of a run's only rank."""

    def record(tag: Path, names: list[str], slots: list[ParameterSlot], zero_stage: Literal[0, 1] = 0) -> None:
        only_rank = Sidecar(
            run_fingerprint="a" * 64,
            step=3,
            tag=tag.name,
            rank=0,
            world_size=1,
            layout=ParallelLayout(zero_stage=zero_stage, precision="fp32", data_parallel_rank=0, data_parallel_size=1),
            files=digest_files(tag, names),
            groups=[slots] if slots else [],
            huggingface_config={"model_type": "t5"},
            data=DataState(samples_consumed=3, shards_fingerprint="b" * 64),
        )
        sidecar.write(tag, only_rank)

    return record


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a fresh interpreter, in ``tmp_path``, and return its exit code and output."""

    def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)

    return run


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Make], Path]:
    """``made_once(name, make)``: a file or folder that the first worker to need it makes, while others wait for it."""
    own = tmp_path_factory.getbasetemp()
    folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def made_once(name: str, make: Make) -> Path:
        made = folder / name
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                making = tmp_path_factory.mktemp("made") / name
                make(making)
                making.rename(made)
        return made

    return made_once


@pytest.fixture(scope="session")
def new_home(made_once: Callable[[str, Make], Path]) -> Callable[[Path], Path]:
    """``new_home(path)`` makes the home of a Prefect server, with a database that it need not create for seconds."""

    def new_home(path: Path) -> Path:
        database = made_once("prefect.db", prefect_servers.make_database)
        path.mkdir(0o700, parents=True)
        shutil.copy(database, path / "prefect.db")
        return path

    return new_home


@pytest.fixture
def one_faiss_thread() -> Iterator[None]:
    """Let faiss use one thread. It shares OpenMP with torch, whose rounding would change in later tests, too."""
    import faiss

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """A SeaweedFS server that only this machine can reach."""
    with running_server(tmp_path_factory.mktemp("object-store")) as server:
        yield server


@pytest.fixture
def s3(object_store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """The object store, with its endpoint and credentials in the environment of this process and its children."""
    from s3fs import S3FileSystem

    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()  # cached clients keep their old credentials
    yield object_store
    S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="session")
def reader(object_store: ObjectServer) -> Any:
    """A plain boto3 reader of the object store (tests.support.s3_reader)."""
    from tests.support.s3_reader import Reader  # imports boto3, which few tests need

    return Reader(object_store.url.removeprefix("s3://"), object_store.environment)


@pytest.fixture
def destination(s3: ObjectServer, request: pytest.FixtureRequest) -> str:
    """A destination in the object store that only this test uses."""
    return f"{s3.url}/{request.node.originalname}-{crc32(request.node.name.encode()):08x}/t5"


@pytest.fixture(scope="session")
def python_with_stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with prepared_python(tmp_path_factory.mktemp("python"), STAGES, {}) as python:
        yield python


@pytest.fixture
def quick_workers(python_with_stages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import modules once for all processes that the test starts. What they compute takes less time than that."""
    monkeypatch.setattr(sys, "executable", python_with_stages)


@pytest.fixture(scope="session")
def python_with_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    modules = ["tests.support.rank_imports"]
    with prepared_python(tmp_path_factory.mktemp("python"), modules, {"DS_ACCELERATOR": "cpu", **_OF_RANKS}) as python:
        yield python


@pytest.fixture
def quick_ranks(python_with_ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``quick_workers``, for ranks on the CPU. Models are not compiled, as that takes minutes."""
    monkeypatch.setattr(sys, "executable", python_with_ranks)
    for name, value in _OF_RANKS.items():
        monkeypatch.setenv(name, value)
