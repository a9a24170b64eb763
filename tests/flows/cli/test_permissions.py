"""A path that this user may not read or write ends every command with one line: the path, the reason, the remedy.

A root that may only be read is refused before any work, and nothing is left in it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from infra.node.ports import free_port
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
for folder, closed, mode, arguments in json.loads(sys.argv[1]):
    os.chdir(folder)
    pathlib.Path(closed).chmod(mode)
    sys.argv = ["t5-pretrain", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            __main__.main()
        except SystemExit as exit:
            code = exit.code
    ended.append((code, out.getvalue(), err.getvalue(), os.listdir("empty")))
    pathlib.Path(closed).chmod(0o700)
print(json.dumps(ended))
"""
DRY_RUN = ("run", "smoke", "--dry-run")
TOKENIZE = ("tokenize", "--corpus", "text", "--tokenizer", "words", "--out", "out")
EXPORT = ("export", "model", "out", "--run", "root/runs/mine", "--tokenizer", "words")
DENIED = (
    "Permission denied; give this user permission (check the folders above, too: `ls -ld` shows their modes), or use "
    "another path"
)
# The path without permissions, and the command.
UNREADABLE = [
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
# The path that can only be read, the command, and the end of the error.
READ_ONLY = [
    ("empty", ("run", "smoke", "--root", "empty"), f"empty cannot be written: {DENIED} (--root or --out)"),
    ("empty", ("run", "smoke", "--root", "empty/root"), f"empty/root cannot be written: {DENIED} (--root or --out)"),
    ("empty", ("corpus", "smoke", "--root", "empty"), f"empty cannot be written: {DENIED} (--root or --out)"),
    ("empty", ("up", "--root", "empty", "--port", str(free_port())), f"empty/prefect cannot be created: {DENIED}"),
    (
        "site/prefect",
        ("run", "smoke", "--root", "site"),
        " cannot be written: Permission denied; choose another root (--root)",
    ),
    ("site/runs", ("run", "smoke", "--root", "site"), f" cannot be created: {DENIED} (--root)"),
]
CASES = [*((closed, 0, command, "") for closed, command in UNREADABLE)]
CASES += [(closed, 0o500, command, ending) for closed, command, ending in READ_ONLY]

pytestmark = pytest.mark.skipif(
    bool(BOUND) and shutil.which("setpriv") is None, reason="root, and no setpriv to be less than root"
)


class Result(NamedTuple):
    """The exit code and output of a command, and what it left in the folder ``empty``."""

    code: int
    out: str
    err: str
    left: list[str]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    pieces = sentencepiece_model.train(TokenizerSpec(vocab_size=300), [Path(os.__file__).read_text("utf-8")])
    cases = [
        (str(_folder(tmp_path_factory.mktemp("case"), pieces)), closed, mode, command)
        for closed, mode, command, _ in CASES
    ]
    command = [*BOUND, sys.executable, "-c", PROGRAM, json.dumps(cases)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
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
    for name in ("empty", "site/prefect", "site/runs"):
        (folder / name).mkdir(parents=True)
    return folder


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{case[2][0]} {case[0]}" for case in CASES])
def test_a_path_without_permissions_is_reported_in_one_line_with_its_path(results: list[Result], number: int) -> None:
    this, (closed, _, _, ending) = results[number], CASES[number]
    assert this.code in {2, 4, 5}, this
    line = this.err.splitlines()[-1]  # on a slow machine, progress comes before it
    assert line.startswith("error: ")
    assert "Traceback" not in this.err
    assert closed in line
    assert "ermission denied" in line
    assert line.endswith(ending)
    assert this.left == []
