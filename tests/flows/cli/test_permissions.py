"""A path that this user may not read or write ends every command with one line: the path, the reason, the remedy."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from t5train.data.vocabulary import sentencepiece_model
from t5train.spec import TokenizerSpec

CAPABILITIES = "-dac_override,-dac_read_search"
# Permissions do not restrict root unless it gives up these capabilities.
BOUND = ["setpriv", f"--bounding-set={CAPABILITIES}", f"--inh-caps={CAPABILITIES}"] if os.geteuid() == 0 else []
# Runs every command in one process, because imports take most of a command's time.
PROGRAM = """
import contextlib, io, json, os, pathlib, sys
from flows.cli import __main__

ended = []
for folder, closed, arguments in json.loads(sys.argv[1]):
    os.chdir(folder)
    pathlib.Path(closed).chmod(0)
    sys.argv = ["t5-pretrain", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            __main__.main()
        except SystemExit as exit:
            code = exit.code
    ended.append((code, out.getvalue(), err.getvalue()))
    pathlib.Path(closed).chmod(0o700)
print(json.dumps(ended))
"""
DRY_RUN = ("run", "smoke", "--dry-run")
TOKENIZE = ("tokenize", "--corpus", "text", "--tokenizer", "words", "--out", "out")
EXPORT = ("export", "model", "out", "--run", "root/runs/mine", "--tokenizer", "words")
# The path without permissions, and the command.
CASES = [
    ("root", ("status", "--root", "root")),
    ("root/runs", ("status", "--root", "root")),
    ("root/runs", ("rm", "mine", "--root", "root", "--yes")),
    ("root/runs/mine/run.json", ("rm", "mine", "--root", "root", "--yes")),
    ("root/runs", ("gc", "--root", "root")),
    ("root/runs/mine", ("gc", "--root", "root")),
    ("root/runs/mine/checkpoints", ("gc", "--root", "root")),
    ("root/runs/mine/checkpoints", ("consolidate", "root/runs/mine/checkpoints", "out")),
    ("root", ("corpus", "smoke", "--root", "root")),
    ("root/corpus", ("corpus", "smoke", "--root", "root")),
    ("text", ("corpus", "smoke", "--root", "root", "--corpus", "text")),
    ("text/deep", ("corpus", "smoke", "--root", "root", "--corpus", "text")),
    ("text", ("corpus", "smoke", "--root", "root", "--corpus", "text/*.txt")),
    ("text/deep", ("corpus", "smoke", "--root", "root", "--corpus", "text/**/*.txt")),
    ("root/shards", ("train", "smoke", "--root", "root")),
    ("root/shards/some", ("train", "smoke", "--root", "root")),
    ("root/shards/some", ("train", "smoke", "--root", "root", "--shards", "root/shards/some")),
    ("text", TOKENIZE),
    ("text/a.txt", TOKENIZE),
    ("words", TOKENIZE),
    ("out", TOKENIZE),
    ("model", (*DRY_RUN, "--set", "model.start_from=model")),
    ("model/config.json", (*DRY_RUN, "--set", "model.start_from=model")),
    ("words", (*DRY_RUN, "--set", "tokenizer.path=words")),
    ("words/spiece.model", (*DRY_RUN, "--set", "tokenizer.path=words")),
    ("hosts", (*DRY_RUN, "--hostfile", "hosts")),
    ("model", ("verify", "model")),
    ("model", ("publish", "model", "published")),
    ("model", ("certify", "model", "words")),
    ("root/runs/mine", EXPORT),
    ("root/runs/mine/run.json", EXPORT),
]

pytestmark = pytest.mark.skipif(
    bool(BOUND) and shutil.which("setpriv") is None, reason="root, and no setpriv to be less than root"
)


class Result(NamedTuple):
    """The exit code and output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """The result of each case."""
    pieces = sentencepiece_model.train(TokenizerSpec(vocab_size=300), [Path(os.__file__).read_text("utf-8")])
    cases = [(str(_folder(tmp_path_factory.mktemp("case"), pieces)), closed, args) for closed, args in CASES]
    command = [*BOUND, sys.executable, "-c", PROGRAM, json.dumps(cases)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert completed.returncode == 0, completed.stderr
    return [Result(*each) for each in json.loads(completed.stdout.splitlines()[-1])]


def _folder(folder: Path, pieces: bytes) -> Path:
    files = ["root/runs/mine/metrics.jsonl", "root/runs/mine/run.json", "text/a.txt", "words/spiece.model", "hosts"]
    for name in (*files, "text/deep/b.txt", "model/config.json", "model/model.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}\n")
    for name in ("root/runs/mine/checkpoints/step-00000001", "root/corpus", "root/shards/some", "out"):
        (folder / name).mkdir(parents=True)
    (folder / "words/spiece.model").write_bytes(pieces)
    return folder


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{args[0]} {closed}" for closed, args in CASES])
def test_a_path_without_permissions_is_reported_in_one_line_with_its_path(results: list[Result], number: int) -> None:
    this, closed = results[number], CASES[number][0]
    assert this.code in {2, 4, 5}, this
    line = this.err.splitlines()[-1]  # on a slow machine, progress comes before it
    assert line.startswith("error: ")
    assert "Traceback" not in this.err
    assert closed in line
    assert "ermission denied" in line
