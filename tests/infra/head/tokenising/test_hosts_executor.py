"""Hosts make the same shards as this machine. What a lost host has begun is done by others, and errors end the work.

Hosts on which jobs hang are in ``test_hung_hosts.py``.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.node.stages.makers import Makers, own_makers
from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.data.vocabulary.tokenizer import build_tokenizer
from t5train.errors import InputError, RemoteFailed, StorageError, WorkerLost
from t5train.spec import CorpusSpec, ShardsSpec, TokenizerSpec
from tests.infra.head.tokenising.conftest import Site
from tests.support.generated_text import write_jsonl
from tests.support.prepared_python import prepared_python

Do = Callable[..., list[dict[str, object]]]


@pytest.fixture(scope="module")
def python_with_dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    modules = ["infra.node.__main__", "infra.node.stages.dask_worker", "infra.head.tokenising.dask_scheduler"]
    modules += ["distributed", "distributed.worker", "distributed.scheduler", "t5train.data.shards"]
    with prepared_python(tmp_path_factory.mktemp("python"), modules, {}) as python:
        yield python


@pytest.fixture(autouse=True)
def quick_hosts(python_with_dask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import modules once for the schedulers, hosts and job processes of all tests."""
    monkeypatch.setattr(sys, "executable", python_with_dask)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode for path in folder.iterdir()}


def test_hosts_make_the_same_files_as_this_machine(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # hosts begin elsewhere, so relative paths have to be made absolute
    root, spec = Path("root"), ShardsSpec(shard_tokens=30_000, workers=1)
    text = write_jsonl(Path("text.jsonl"), 1000)
    text.write_text(text.read_text("utf-8") + '{"id": "copy", "text": "a b"}\n' * 2, "utf-8")
    corpus_spec = CorpusSpec(source=str(text), remove=("duplicates",))  # what stays is stored in the root
    corpus = build_corpus(corpus_spec, root)
    tokenizer = build_tokenizer(TokenizerSpec(vocab_size=300), corpus_spec, corpus, root)
    made = corpus_spec, corpus, tokenizer, root
    here = build_shards(spec, *made, out=Path("here"))
    done = list[int]()
    there = build_shards(
        spec, *made, lambda _, count, total: done.append(total - count), out=Path("there"), workers=site.workers()
    )
    assert (there.fingerprint, there.files, there.counts) == (here.fingerprint, here.files, here.counts)
    assert modes(Path("there")) == modes(Path("here"))
    assert here.counts["num_shards"] == 3
    assert done[-1] == 0


def test_jobs_of_a_lost_host_are_done_by_the_other_once(do: Do, site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    advanced = list[int]()
    killer = threading.Thread(target=lambda: site.kill("two", begun=2))
    killer.start()
    results = do("finish", site.jobs(4, seconds=1), advanced.append)
    killer.join()
    assert sorted(str(each["number"]) for each in results) == ["0", "1", "2", "3"]
    assert sum(advanced) == 0 + 1 + 2 + 3 + 4 * 10
    assert "two: " in caplog.text
    assert "The other hosts make its shards" in caplog.text


def test_when_all_hosts_are_lost_the_error_names_them_and_what_to_do(do: Do, site: Site) -> None:
    threading.Thread(target=lambda: site.kill("one", "two", begun=2)).start()
    with pytest.raises(WorkerLost, match=r"no host is left to tokenise: .*run this again") as raised:
        do("finish", site.jobs(2, seconds=60))
    assert "one: " in str(raised.value)
    assert "two: " in str(raised.value)


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        ("refuse", InputError, r"^the file has no text\. Name another$"),
        ("read_nothing", StorageError, "/dev/null/none: Not a directory"),
    ],
)
def test_an_error_of_a_job_is_raised_here_and_not_tried_again(
    do: Do, site: Site, function: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        do(function, site.jobs(1))
    assert len((site.folder / "0.begun").read_text().splitlines()) == 1


def test_a_job_whose_process_is_killed_is_tried_again_but_not_forever(do: Do, site: Site) -> None:
    assert do("die_once", site.jobs(1)) == [{"number": 0}]
    (site.folder / "0.begun").unlink()
    with pytest.raises(WorkerLost, match=r"^(one|two): a worker process was killed by SIGKILL"):
        do("die", site.jobs(1))
    assert len((site.folder / "0.begun").read_text().splitlines()) == 3


def test_a_host_that_reads_other_files_is_refused_before_anything_begins(do: Do, site: Site) -> None:
    text = site.folder / "text"
    text.write_text("text")
    (job,) = site.jobs(1)
    job["stretches"] = [(str(text), "text", (0, 1, 0, 4), 0)]
    ssh = site.folder / "bin" / "ssh"
    ssh.write_text(ssh.read_text().replace("exec sh", f'[ "$4" = one ] || echo more >> {text}\nexec sh'))
    with pytest.raises(RemoteFailed, match=r"^(one|two): .*text has 9 bytes here, and 4 on the head\. Mount"):
        do("finish", [job])
    assert not site.begun()


@pytest.mark.parametrize(
    ("code", "versions", "words"),
    [
        ("", {"distributed": "2020.1"}, r"the head has distributed 2020\.1\. .*pip install distributed==2020"),
        ("0" * 64, {}, r"^(one|two): .*code of this project is not the head's.*--ship-code"),
    ],
)
def test_a_host_with_another_dask_or_other_code_is_refused_with_the_remedy(
    do: Do, site: Site, monkeypatch: pytest.MonkeyPatch, code: str, versions: dict[str, str], words: str
) -> None:
    own = own_makers(["distributed"])
    makers = Makers(code or own.code, {**own.versions, **versions})
    monkeypatch.setattr("infra.head.tokenising.hosts_executor.own_makers", lambda *_: makers)
    with pytest.raises(RemoteFailed, match=words):
        do("finish", site.jobs(1))
    assert not site.begun()


def test_without_dask_the_error_says_what_to_install(do: Do, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.head.tokenising.scheduler_process.find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"distributed and cryptography cannot be imported.*t5-pretrain\[dask\]"):
        do("finish", site.jobs(1))


def test_a_host_on_which_processes_die_gets_no_more_jobs(do: Do, site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ssh = site.folder / "bin" / "ssh"
    ssh.write_text(ssh.read_text().replace("exec sh", '[ "$4" = two ] || export SICK=1\nexec sh'))
    results = do("die_on_sick_host", site.jobs(6))
    assert sorted(str(each["number"]) for each in results) == [str(number) for number in range(6)]
    assert "one: 3 shards in a row could not be made there: one: a worker process was killed by SIGKILL" in caplog.text
