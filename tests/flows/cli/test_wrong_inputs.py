"""Wrong inputs: each is refused in one line with value, constraint and remedy, and nothing is lost.

Each row is a command, the exit code of its kind of error (``t5train.errors``), and what the line says. The commands run
in one process, because imports take most of a command's time, in a folder with the files that ``FILES`` lists.
"""

import gzip
import hashlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

PROGRAM = """
import contextlib, io, json, shlex, sys, time
from flows.cli import __main__

ended = []
for command in json.loads(sys.stdin.read()):
    sys.argv = ["t5-pretrain", *shlex.split(command)]
    out, err, began = io.StringIO(), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            __main__.main()
        except SystemExit as exit:
            code = exit.code
    ended.append((code, out.getvalue(), err.getvalue(), time.process_time() - began))
print(json.dumps(ended))
"""
WORDS = "the model reads this text, which is one passage of several words"
TEXT = "".join(f"{WORDS} {number}\n" for number in range(3000))
FILES: dict[str, bytes] = {
    "good.txt": TEXT.encode(),
    "one.txt": TEXT.replace("\n", " ").encode(),
    "few.txt": "".join(f"{WORDS} {number}\n" for number in range(60)).encode(),
    "empty.txt": b"",
    "blank.txt": b"\n \n",
    "latin.txt": b"caf\xe9\n",
    "nul.txt": b"one\0two\n",
    "bad.jsonl": b'{"text": "good"}\nnot json\n',
    "number.jsonl": b'{"text": 7}\n',
    "plain.tsv": b"a\tb\n1\t2\n",
    "short.tsv": b"id\ttext\ttitle\n1\ttwo\n",
    "cut.txt.gz": gzip.compress(TEXT.encode(), mtime=0)[:2000],
    "fake.txt.zst": b"not compressed\n",
    "fake.parquet": b"not parquet\n",
    "folder/notes.md": b"# a title\n",
    "fake.model": b"not a model\n",
    "vocabulary/README.md": b"no vocabulary here\n",
    "hosts": b"node1 slots=2\nnode2 slots=2\n",
    "uneven": b"node1 slots=2\nnode2 slots=4\nnode3 slots=2\n",
    "twice": b"node1 slots=2\nnode1 slots=2\n",
    "no-slots": b"node1\n",
    "option": b"-oProxyCommand=x slots=2\n",
    "zero": b"node1 slots=0\n",
    "no-hosts": b"# none\n",
    "file": b"a file\n",
    "typo.yaml": b"recipe: smoke\noptimizer:\n  num_step: 4\n",
    "base.yaml": b"recipe: base\n",
    "part.yaml": b"optimizer:\n  seed: 7\n",
    "twice.yaml": b"recipe: smoke\nrecipe: base\n",
    "syntax.yaml": b"recipe: [smoke\n",
    "damaged/manifest.json": b"{",
    "t5/config.json": b'{"model_type": "bert"}',
}


class Wrong(NamedTuple):
    command: str
    code: int
    said: str


OPTIONS = [
    *(
        Wrong(command, 2, "name a recipe (see `t5-pretrain recipes`), or a file with --config")
        for command in ("run", "train", "bench")
    ),
    Wrong("nonsense", 2, "No such command 'nonsense'"),
    Wrong("run smoke --nonsense", 2, "No such option: --nonsense"),
    Wrong("run smoke --steps 9", 2, "with `--set part.key=value` (did you mean 'optimizer.num_steps'?)"),
    Wrong("run smoke --set x", 2, "'x' is not of the form part.key=value"),
    Wrong("run smoke --json", 2, "it needs --dry-run"),
    Wrong("run --trial --config part.yaml", 2, "use `run RECIPE --trial`"),
    Wrong("run smoke --num-nodes two", 2, "--num-nodes"),
    Wrong("tokenize --corpus good.txt --out out", 2, "Missing option '--tokenizer'"),
    Wrong("tokenize --corpus good.txt --tokenizer fake.model --out out --workers 0", 2, "it must be greater than"),
    Wrong("consolidate folder out --shard-size 5X", 2, "'5X' is not a size such as 5G or 500Mi"),
    Wrong("up --port 0", 2, "--port"),
    Wrong("up --port 99999", 2, "65535"),
    Wrong("data show smoke --split testing", 2, "'testing' is not one of 'train', 'validation', 'test'"),
    Wrong("data show smoke --count 0", 2, "--count"),
    Wrong("generate", 2, "Missing argument"),
    Wrong("generate t5 text --temperature -1", 2, "--temperature is '-1': it must be greater than or equal to 0.01"),
    Wrong("generate t5 text --seed 9223372036854775808", 2, "--seed is '9223372036854775808': it must be less than"),
    Wrong("evaluate t5 --corpus good.txt --seed 18446744073709551616", 2, "--seed is '18446744073709551616': it must"),
    Wrong("predict t5 good.txt --length-penalty nan", 2, "--length-penalty is 'nan': it must be less than or equal to"),
    Wrong("serve t5 --timeout nan", 2, "--timeout is 'nan': it must be less than or equal to 86400"),
    Wrong("score 'no\nwhere'", 4, r"no\nwhere is not a file of predictions"),
    Wrong("generate 'a/no\nwhere' text", 4, r"a/no\nwhere, which is not a folder on this machine"),
    Wrong("generate t5 text --temperature=hot", 2, "--temperature is 'hot': it must be a number. See"),
    Wrong("generate t5 text --num-beams 0", 2, "--num-beams"),
    Wrong("generate t5 text --top-p 1.5", 2, "--top-p"),
    Wrong("evaluate t5", 2, "Missing option '--corpus'"),
    Wrong("evaluate t5 --corpus good.txt --split tests", 2, "'tests' is not one of"),
    Wrong("evaluate t5 --corpus good.txt --max-sequences 0", 2, "--max-sequences"),
]
SETTINGS = [
    Wrong(f"run smoke --dry-run --set {setting}", 2, said)
    for setting, said in {
        "optimizer.num_step=4": "unknown setting 'optimizer.num_step' (did you mean 'optimizer.num_steps'?)",
        "seed=4": "did you mean 'optimizer.seed'?",
        "batch_size=4": "did you mean 'layout.micro_batch_sequences'?",
        "optimizer.num_steps=many": "optimizer.num_steps is 'many': it must be a whole number of at least 1",
        "optimizer.num_steps=0": "optimizer.num_steps is 0: it must be a whole number of at least 1",
        "optimizer.num_steps=1.5": "optimizer.num_steps is 1.5: it must be a whole number",
        "optimizer.peak_learning_rate=nan": "optimizer.peak_learning_rate is 'nan': it must be a number above 0",
        "optimizer.peak_learning_rate=-1": "optimizer.peak_learning_rate is -1: it must be a number above 0",
        "optimizer.warmup_steps=500": "it must be below optimizer.num_steps (400)",
        "optimizer.kind=sgd": "optimizer.kind is 'sgd': it must be one of adamw-rms, adamw",
        "optimizer.precision=fp8": "it must be one of fp32, bf16, fp16",
        "optimizer.betas=[0.9]": "optimizer.betas",
        "optimizer.global_batch_sequences=65": "it must be a multiple of layout.micro_batch_sequences x cluster.ranks",
        "cluster.accelerator=tpu": "cluster.accelerator is 'tpu': it must be one of",
        "cluster.ranks=0": "cluster.ranks is 0: it must be a whole number from 1",
        "cluster.ranks=3": "(32 x 3 = 96)",
        "layout.zero_stage=4": "layout.zero_stage is 4: it must be one of 0, 1, 2, 3",
        "layout.offload=disk": "layout.offload is 'disk': it must be one of none, optimizer, all",
        "layout.pipeline_stages=3": "layout.pipeline_stages is 3: it must divide cluster.ranks (2)",
        "layout.pipeline_stages=8 --set cluster.ranks=8": "is 8: the model can be split into at most",
        "layout.expert_parallel_size=2": "a dense model has no experts to spread; set 1",
        "model.preset=huge": "model.preset is 'huge': it must be one of",
        "model.version=v2": "model.version is 'v2': it must be one of v1.1, v1.0",
        "model.moe.num_experts=4": "set model.version=v1.0",
        "model.vocab_size=256": "set model.vocab_size=2176",
        "model.dropout_rate=1.5": "model.dropout_rate is 1.5: it must be a number",
        "model.start_from=s3://key:word@models/t5": "is s3://models/t5: it must be a folder on this machine, hf:",
        "model.moe.top_k=2 --set model.moe.num_experts=4 --set model.version=v1.0": "model.moe.top_k is 2, but Switch",
        "objective.input_tokens=4096": "Raise objective.mean_span_tokens or lower objective.input_tokens",
        "objective.mixing_weights=7,x": "item 2 of objective.mixing_weights is 'x': it must",
        "objective.noise_density=0.9": "objective.noise_density is 0.9: it must be a number above 0 and below 0.5",
        "tokenizer.path=nowhere.model": "there is no such file or folder. Correct the path",
        "tokenizer.path=vocabulary": "that folder has neither spiece.model nor tokenizer.json",
        "tokenizer.vocab_size=10": "tokenizer.vocab_size is 10: it must be a whole number",
        "corpus.split=[900,30,20]": "it must be three numbers that sum to 1000",
        "corpus.split=[1000,0,0]": "the first two above zero",
        "corpus.source=https://user:word@example.invalid/a.txt": "corpus.source has a password, a key or a query",
        "storage.publish_to=s3://key:word@bucket/t5": "storage.publish_to has a password, a key or a query",
        "storage.checkpoint_every_steps=0": "storage.checkpoint_every_steps is 0: it must be a whole number",
        "storage.keep_last=0": "storage.keep_last is 0: it must be a whole number",
    }.items()
]
CONFIGS = {
    "": "line 1: unknown recipe 'smok' (did you mean 'smoke'?); choose one of smoke, small",
    "optimizer: {seed: null}": "line 2: optimizer.seed is null: it must be a whole",
    "optimizer: {num_steps: many}": "line 2: optimizer.num_steps is 'many': it must be a whole number",
    "optimizer: {num_steps: 9}": "line 2: optimizer.warmup_steps is 40: it must be below",
    "optimizer: {peak_learning_rate: 1e999}": "line 2: optimizer.peak_learning_rate is inf: it must",
    "model: {version: 1.1}": "line 2: model.version is 1.1: it must be one of v1.1, v1.0",
    "model: {compile: 2}": "line 2: model.compile is 2: it must be true or false",
    "layout: {offload: no}": "line 2: layout.offload is 'no': it must be one of none",
    "cluster: {environment: A}": "line 2: cluster.environment is 'A': it must be a list of text",
    "cluster: {hostfile: hosts, ranks: 3}": "line 2: cluster.ranks is 3, but the hosts chosen from",
    "name: a/b": "line 2: name is 'a/b': it must be text of at most 80 of the characters",
}
FILES |= {
    f"wrong-{number}.yaml": f"recipe: {'smoke' if text else 'smok'}\n{text}\n".encode()
    for number, text in enumerate(CONFIGS)
}
OF_CONFIGS = [
    *(Wrong(f"run --config wrong-{number}.yaml", 2, said) for number, said in enumerate(CONFIGS.values())),
    *(
        Wrong(f"{command} --config typo.yaml", 2, "typo.yaml, line 3: unknown setting 'optimizer.num_step' (did you")
        for command in ("run", "train", "preflight", "bench", "corpus", "tokenizer")
    ),
    Wrong("run --config nowhere.yaml", 4, "there is no configuration file nowhere.yaml: correct the path"),
    Wrong("run --config twice.yaml", 2, "twice.yaml, lines 1 and 2: recipe is there twice: keep one of them"),
    Wrong("run --config syntax.yaml", 2, "not valid YAML"),
    Wrong("run --config empty.txt", 2, "empty.txt has no settings"),
    Wrong("run --config part.yaml", 2, "part.yaml names no recipe: add a line such as `recipe: smoke`"),
    Wrong("run smoke --config base.yaml", 2, "the recipe 'smoke', but base.yaml, line 1 names 'base': leave"),
    Wrong("init smok", 2, "unknown recipe 'smok' (did you mean 'smoke'?)"),
    Wrong("init smoke --set optimizer.num_steps=4", 2, "optimizer.warmup_steps is 40"),
]
TEXTS = [
    Wrong(f"run smoke --set corpus.source={shlex.quote(source)}", 4, said)
    for source, said in {
        "nowhere.txt": "corpus.source 'nowhere.txt' does not exist. Correct the path or URL",
        "nowhere/*.txt": "corpus.source 'nowhere/*.txt' matches no file. Correct the pattern",
        "one.txt": "is 1 passage of 0.2 MB, none of which falls into the",
        "few.txt": "Add text, or lower optimizer.global_batch_sequences or objective.input_tokens",
        "empty.txt": "holds no text: all files are empty. Set corpus.source to files with text",
        "blank.txt": "it holds no text. Set corpus.source to files with text",
        "latin.txt": "latin.txt line 1 is not UTF-8: byte 3 of the text is 0xe9. Convert the file to UTF-8",
        "bad.jsonl": "bad.jsonl line 2 is not JSON",
        "number.jsonl": 'number.jsonl line 1 is not an object with "text": "...". Correct this line',
        "nul.txt": "nul.txt line 1 has a NUL byte, so the file is not text in UTF-8",
        "plain.tsv": "plain.tsv begins with 'a\\tb', but must begin with the header",
        "short.tsv": "short.tsv line 2 has 2 fields separated by tabs, but must have three",
        "cut.txt.gz": "cut.txt.gz cannot be read to its end",
        "fake.txt.zst": "fake.txt.zst cannot be read to its end",
        "fake.parquet": "fake.parquet cannot be read as parquet",
        "folder/notes.md": "notes.md, which has an unsupported format",
        "folder": "It has only files of other formats: notes.md",
        "foo://bucket/text": "foo://bucket/text cannot be read (corpus.source): Protocol not known: foo",
    }.items()
]
PLACES = [
    Wrong("run smoke --set corpus.source=", 2, "corpus.source is empty: name a file, folder, pattern or URL"),
    Wrong("run smok", 2, "unknown recipe 'smok' (did you mean 'smoke'?)"),
    Wrong("run smoke --set corpus.languages=English", 2, "it must be a list of language codes such as en or en-US"),
    Wrong("run base", 2, "To try the recipe on this machine's CPUs with a tiny model, add --trial"),
    Wrong(
        "run base --set cluster.accelerator=cpu",
        2,
        "recipe 'base' needs text to train on: name a file",
    ),
    Wrong("run smoke --root file", 5, "file cannot be written: Not a directory; a part of the path is a file"),
    Wrong("run smoke --root 'runs[1]'", 2, "choose a folder without these characters"),
    Wrong("run smoke --name a/b", 2, "name is 'a/b': it must be"),
    Wrong("run smoke --name ..", 2, "name is '..': it must be"),
    Wrong("run smoke --publish-to folder", 12, "folder exists and is not a publication"),
    Wrong("run smoke --set tokenizer.path=fake.model", 4, "fake.model is not a SentencePiece model, or is damaged"),
    Wrong("run smoke --set model.start_from=nowhere", 4, "is not a folder on this machine. Correct the path"),
    Wrong("run smoke --hostfile nowhere", 2, "the hostfile cannot be read: "),
    Wrong("run smoke --hostfile twice", 2, "line 2: host 'node1' is listed twice"),
    Wrong("run smoke --hostfile no-slots", 2, "line 1: 'node1' is not of the form 'name slots=N'"),
    Wrong("run smoke --hostfile option", 2, "'-oProxyCommand=x' is not a plain host name"),
    Wrong("run smoke --hostfile zero", 2, "node1 has slots=0; slots must be 1 to 1024"),
    Wrong("run smoke --hostfile no-hosts", 2, "lists no host: write a line 'name slots=N' for each host"),
    Wrong("run smoke --hostfile hosts --include node3", 2, "'node3' is not in the hostfile (node1, node2)"),
    Wrong("run smoke --hostfile hosts --num-nodes 3", 2, "the hostfile has 2 hosts. Request fewer nodes"),
    Wrong("run smoke --num-nodes 2", 2, "cluster.hostfile is not set: give --hostfile"),
    Wrong("run smoke --dry-run --ship-code", 2, "cluster.hostfile is not set: give --hostfile"),
    *(
        Wrong(f"{command} smoke --hostfile uneven {options}", 2, said)
        for command in ("run", "train")
        for options, said in {
            "--include node1 --exclude node2": "cluster.include and cluster.exclude cannot be combined",
            "--launcher mpich": "cluster.launcher is 'mpich': it must be one of pdsh, slurm, openmpi",
            "--launcher slurm": "cluster.launcher is 'slurm', but slurm starts the same number of ranks",
            "--set cluster.ranks=2": "cluster.ranks is 2, but the hosts chosen from ",
            "--num-nodes 2": "a multiple of layout.micro_batch_sequences x cluster.ranks (32 x 6 = 192)",
        }.items()
    ),
    Wrong("run smoke --root 'runs[1]'", 2, "DeepSpeed would read [ in it as a glob pattern"),
    Wrong("run smoke --set cluster.accelerator=cuda", 2, "GPUs that torch can use. Reduce cluster.ranks"),
    Wrong("run moe --set corpus.source=pydocs", 2, "with a tiny model, add --trial to the same command"),
    Wrong("run smok --dry-run --json", 2, "unknown recipe 'smok'"),
    Wrong("verify nowhere --json", 4, "nowhere"),
    Wrong("gc --set storage.rot=x --json", 2, "unknown setting 'storage.rot'"),
    Wrong(
        "tokenize --corpus good.txt --tokenizer fake.model --out out --set shards.executor=dask",
        2,
        "with --hostfile FILE, all its hosts tokenise with Dask",
    ),
    Wrong("train smoke", 4, "name a folder of them with --shards, or use `run`"),
    Wrong("train smoke --shards folder", 4, "folder is not a finished shards folder"),
    Wrong("preflight smoke", 2, "give a hostfile with --hostfile"),
    Wrong("consolidate nowhere out", 4, "nowhere is not a folder: give a DeepSpeed save folder"),
    Wrong("consolidate folder out", 4, "folder holds no checkpoint"),
    Wrong("export nowhere out --run nowhere --tokenizer nowhere", 2, "nowhere is not a run folder"),
    Wrong("publish folder out", 4, "folder is not a finished export folder"),
    Wrong("verify nowhere", 4, "If nowhere is the name of a run, `t5-pretrain status nowhere` shows its folders"),
    Wrong("verify no/where", 4, "does not exist. Check the path"),
    Wrong("verify damaged", 4, "manifest.json is damaged, or not a manifest"),
    Wrong("status nowhere", 4, "nowhere"),
    Wrong("rm nowhere --yes", 4, "nowhere"),
    Wrong("generate nowhere text", 4, "is not a folder on this machine. Correct the path"),
    Wrong("generate t5 text", 4, "t5 has neither model.safetensors nor model.safetensors.index.json"),
    Wrong("evaluate nowhere --corpus good.txt", 4, "is not a folder on this machine. Correct the path"),
    Wrong("deploy", 2, "no Prefect server is configured"),
]
WRONG = [*OPTIONS, *SETTINGS, *OF_CONFIGS, *TEXTS, *PLACES]


class Ended(NamedTuple):
    code: int
    out: str
    err: str
    cpu_seconds: float


def tree(folder: Path) -> dict[str, str]:
    """The sha256 of every file below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    folder = tmp_path_factory.mktemp("wrong")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    before = tree(folder)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([wrong.command for wrong in WRONG]),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert tree(folder) == before, "nothing is lost or left"
    return {wrong.command: Ended(*each) for wrong, each in zip(WRONG, json.loads(done.stdout), strict=True)}


@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.command for wrong in WRONG])
def test_a_wrong_input_is_refused_in_one_line(ended: dict[str, Ended], wrong: Wrong) -> None:
    this = ended[wrong.command]
    assert wrong.said in this.err
    assert this.err.startswith("error: ")
    assert this.err.count("\n") == 1
    assert this.out == ""
    assert this.code == wrong.code
    assert this.cpu_seconds < 3
