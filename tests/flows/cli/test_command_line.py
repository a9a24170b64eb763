"""The console script: its output and its exit codes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from flows.cli import __main__, run_command
from infra.head.preflight import run_checks
from infra.head.preflight.text_checks import LOOK_BYTES
from infra.node.attempts.run_lock import run_lock
from t5train import host_resources
from t5train.checkpoint.resume_point import ask_to_begin_again
from t5train.data.samples.loader import ORDER_VERSION
from t5train.data.vocabulary.sentencepiece_model import train
from t5train.errors import NotGathered
from t5train.model.model_shape import huggingface_config, resolve
from t5train.records.stage_records import TokenShards
from t5train.spec import TokenizerSpec
from t5train.spec.recipes import recipe

RunPython = Callable[..., subprocess.CompletedProcess[str]]

HOLDS_A_RUN = """
import sys
from pathlib import Path
from infra.node.attempts.run_lock import run_lock

with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""

NO_PREFECT = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "prefect":
            raise ModuleNotFoundError("prefect is blocked", name=name)

sys.meta_path.insert(0, Blocker())
sys.argv[0] = "t5-pretrain"
from flows.cli.__main__ import main
"""
WITHOUT_PREFECT = NO_PREFECT + "main()"
HELP_WITHOUT_PREFECT = (
    NO_PREFECT
    + """
for command in sys.argv[1:]:
    sys.argv[1:] = [command, "--help"]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""
)


SWITCH = ("--set", "model.moe.num_experts=4", "--set", "model.version=v1.0")
TOKENIZE = ["tokenize", "--corpus", "a.txt", "--tokenizer", "a.model", "--out", "tokens"]
STAGES = ("--set", "layout.pipeline_stages=8", "--set", "cluster.ranks=8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "smok"], "unknown recipe 'smok' (did you mean 'smoke'?)"),
        (["run", "smoke", "--set", "optimizer.num_stepss=4"], "did you mean 'optimizer.num_steps'?"),
        (["run", "smoke", "--set", "seed=4"], "unknown setting 'seed' (did you mean 'optimizer.seed'?)"),
        (
            ["run", "smoke", "--set", "objective.mixing_weights=7,x"],
            "item 2 of objective.mixing_weights is 'x': it must",
        ),
        ([*TOKENIZE, "--set", "shards.executor=dask"], "with --hostfile FILE, all its hosts tokenise with Dask"),
        (["run", "smoke", "--set", "cluster.accelerator=tpu"], "cluster.accelerator is 'tpu'"),
        (["run", "smoke", "--set", "optimizer.num_steps=many"], "optimizer.num_steps is 'many'"),
        (["run", "smoke", "--set", "optimizer.global_batch_sequences=65"], "must be a multiple of"),
        (["run", "smoke", "--set", "model.vocab_size=256"], "model.vocab_size is 256"),
        (["run", "smoke", "--set", "objective.input_tokens=4096"], "needs 227 spans, but there are 100 sentinels"),
        (["run", "smoke", "--root", "runs[1]"], "DeepSpeed would read [ in it as a glob pattern"),
        (["run", "smoke", "--set", "corpus.source=nowhere.txt"], "corpus.source 'nowhere.txt'"),
        (["run", "smoke", "--set", "tokenizer.path=nowhere.model"], "tokenizer.path is nowhere.model"),
        (["run", "smoke", "--set", "model.start_from=nowhere"], "this machine has no such folder. Correct"),
        (
            ["run", "smoke", "--dry-run", "--set", "model.start_from=nowhere"],
            "this machine has no such folder. Correct",
        ),
        (["run", "smoke", "--set", "model.start_from=s3://key:x@models/t5"], "is s3://models/t5: it must be a folder"),
        (["run", "smoke", "--dry-run", "--set", "model.moe.top_k=2", *SWITCH], "model.moe.top_k is 2"),
        (["run", "smoke", "--dry-run", *STAGES], "layout.pipeline_stages is 8: the model can be split into at most"),
        (["train", "smoke"], "no token shards"),
        (["verify", "no/where"], "manifest.json cannot be read"),
    ],
)
def test_an_error_prints_one_line(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert t5_pretrain(*arguments) in {2, 4}, "a wrong setting, or an input that cannot be used"
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert message in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


@pytest.mark.parametrize(
    "arguments", [["run"], ["run", "smoke", "--set", "x"], ["consolidate", "a", "b", "--shard-size", "5X"]]
)
def test_wrong_usage_exits_with_2(t5_pretrain: Callable[..., int], arguments: list[str]) -> None:
    assert t5_pretrain(*arguments) == 2


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), BaseExceptionGroup("tasks", [KeyboardInterrupt()])])
def test_ctrl_c_prints_one_line_and_exits_with_130(
    t5_pretrain: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    interrupt: BaseException,
) -> None:
    def interrupted(_: str) -> None:
        raise interrupt

    monkeypatch.setattr(run_command, "show_rows", interrupted)
    assert t5_pretrain("recipes") == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("recipe", "num_steps"), [("smoke", 50), ("moe", 20_000), ("pipeline", 20_000), ("zero3", 20_000)]
)
def test_a_dry_run_shows_the_whole_plan_and_creates_nothing(
    t5_pretrain: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    golden: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    recipe: str,
    num_steps: int,
) -> None:
    root = tmp_path / "root"
    _on_a_machine_with_accelerators(monkeypatch, 2)
    asked = ("--set", f"optimizer.num_steps={num_steps}", "--set", "corpus.source=pydocs")
    assert t5_pretrain("run", recipe, "--dry-run", "--root", str(root), *asked) == 0
    output = capsys.readouterr().out.replace(str(root), "{root}").replace(sys.executable, "{python}")
    golden(f"{recipe}.dry-run", output)
    assert t5_pretrain("run", recipe, "--dry-run", "--json", "--root", str(root), *asked) == 0
    as_json = json.loads(capsys.readouterr().out)
    golden(f"{recipe}.deepspeed-config", json.dumps(as_json["deepspeed_config"], indent=1) + "\n")
    assert list(tmp_path.iterdir()) == []


def _on_a_machine_with_accelerators(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let checks find accelerators, ample memory and disk space."""
    monkeypatch.setattr(run_checks, "can_have_any", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(host_resources, "host_memory_bytes", lambda: 10**12)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))


def test_a_dry_run_says_first_that_the_machine_has_no_accelerator_and_describes_the_run(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert t5_pretrain("run", "base", "--dry-run", "--root", str(tmp_path / "root")) == 2
    output = capsys.readouterr()
    assert output.out.startswith("# would be refused\nthis machine has no GPU")
    assert "\n# memory of a rank" in output.out
    assert output.err.startswith("error: this machine has no GPU")
    assert t5_pretrain("run", "base", "--root", str(tmp_path / "root")) == 2
    assert capsys.readouterr().err == output.err, "a run is refused for the same reason"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"corpus.source": "one.txt"}, "is 1 passage of 1.9 MB, none of which falls into the validation split"),
        ({"corpus.source": "folder"}, "It has only files of other formats: notes.md."),
        ({"corpus.source": "absent.txt"}, "corpus.source 'absent.txt' does not exist"),
        ({"storage.keep_last": "1000000000", "optimizer.num_steps": "100000000000"}, "too little disk space"),
    ],
)
def test_a_dry_run_and_a_run_are_refused_for_the_same_reason(
    t5_pretrain: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: dict[str, str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("word " * 380_000 + "\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.md").write_text("# a title\n")
    changes = [option for name, value in settings.items() for option in ("--set", f"{name}={value}")]
    assert (code := t5_pretrain("run", "smoke", "--dry-run", *changes)) in {4, 5}, "text or disk space"
    refusal = capsys.readouterr().err
    assert reason in refusal
    assert t5_pretrain("run", "smoke", *changes) == code
    assert capsys.readouterr().err == refusal
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "one.txt"]


def test_a_run_with_two_experts_per_token_is_refused_before_it_starts(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    asked = ("--set", "corpus.source=pydocs", "--set", "model.moe.top_k=2", "--set", "cluster.accelerator=cpu")
    assert t5_pretrain("run", "moe", "--root", str(root), *asked) == 2
    assert "model.moe.top_k is 2, but SwitchTransformers in transformers has 1" in capsys.readouterr().err
    assert not root.exists()


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_vocabulary_that_differs_from_the_starting_models_is_refused_before_any_work(
    t5_pretrain: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    dry: tuple[str, ...],
) -> None:
    words = [f"word {number} of {number * 7919}" for number in range(2000)]
    (tmp_path / "spiece.model").write_bytes(train(TokenizerSpec(vocab_size=300), words))
    model = tmp_path / "model"
    shape = resolve(recipe("smoke").model, tokenizer_vocab_size=400)
    T5ForConditionalGeneration(T5Config(**huggingface_config(shape, pad_id=0, eos_id=1))).save_pretrained(model)
    start = ("run", "smoke", "--root", str(tmp_path / "root"), "--set", f"model.start_from={model}", *dry)
    assert t5_pretrain(*start, "--set", "tokenizer.vocab_size=300") == 2
    assert "tokenizer.path is left out" in capsys.readouterr().err
    (model / "spiece.model").write_bytes(b"another")
    assert t5_pretrain(*start, "--set", f"tokenizer.path={tmp_path / 'spiece.model'}") == 2
    assert f"Set tokenizer.path={model}" in capsys.readouterr().err
    assert not (tmp_path / "root").exists()


def test_a_run_that_does_not_fit_in_memory_is_refused_before_it_starts(
    t5_pretrain: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    monkeypatch.setattr(host_resources, "host_memory_bytes", lambda: 128 * 10**9)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    asked = ("--set", "corpus.source=pydocs", "--set", "cluster.accelerator=cuda")
    assert t5_pretrain("run", "t5_11b_one_gpu", "--root", str(root), *asked) == 2
    assert "need 290.6 GB of host memory, but this machine has 128.0 GB" in capsys.readouterr().err
    assert not root.exists()


def test_stage_commands_work_without_prefect(run_python: RunPython, tmp_path: Path) -> None:
    text = "\n".join(json.dumps({"id": str(number), "text": f"line {number} of a text"}) for number in range(200))
    (tmp_path / "text.jsonl").write_text(text + "\n")
    arguments = ("corpus", "--corpus", str(tmp_path / "text.jsonl"), "--root", str(tmp_path / "root"))
    made = run_python(WITHOUT_PREFECT, *arguments)
    assert made.stdout.startswith("corpus: "), made.stderr
    folder = made.stdout.split()[1]
    assert "(reused)" in run_python(WITHOUT_PREFECT, *arguments).stdout
    verified = run_python(WITHOUT_PREFECT, "verify", folder)
    assert verified.stdout.startswith("verified: corpus"), verified.stderr
    commands = ("tokenizer", "tokenize", "train", "consolidate", "export", "certify", "publish", "status", "rm")
    helped = run_python(HELP_WITHOUT_PREFECT, *commands)
    assert helped.returncode == 0, helped.stderr
    assert all(f"Usage: t5-pretrain {command} " in helped.stdout for command in commands)
    assert run_python(WITHOUT_PREFECT, "status").returncode == 0


@pytest.mark.parametrize("place", ["work/published/mine", "work/runs/mine", "work/runs/mine/export"])
def test_verify_says_that_a_run_has_not_finished_and_what_to_do(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str
) -> None:
    run = tmp_path / "work" / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"spec": {"optimizer": {"num_steps": 60}}}')
    (run / "metrics.jsonl").write_text('{"step": 8, "loss": 4.125}\n')
    shows = f"`t5-pretrain status mine --root {tmp_path / 'work'}` shows more"
    assert t5_pretrain("verify", place) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / place} has no manifest.json yet, because run mine has not finished: ")
    assert line.endswith(f"its state is 'stopped', at step 8 of 60. Continue it first; {shows}")
    with run_lock(run):
        assert t5_pretrain("verify", place) == 4
    assert f"'running', at step 8 of 60. Wait until it is published; {shows}" in capsys.readouterr().err


def test_a_second_start_of_a_running_run_is_refused(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", HOLDS_A_RUN, str(tmp_path / "work" / "runs" / "mine")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        for dry in ([], ["--dry-run"]):
            assert t5_pretrain("run", "smoke", "--name", "mine", *dry) == 6
            assert "is in use by process" in capsys.readouterr().err


def test_a_run_begun_with_other_settings_is_refused_before_anything_starts(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    begun = tmp_path / "work" / "runs" / "mine" / "run.json"
    begun.parent.mkdir(parents=True)
    settings = {"optimizer.seed": 1, "corpus.split_seed": 2, "corpus.source": "elsewhere.txt", "cluster.ranks": 1}
    spec = recipe("smoke").with_settings(settings).model_dump(mode="json")
    begun.write_text(json.dumps({"identity": {"order_version": ORDER_VERSION}, "spec": spec}))
    published = tmp_path / "work" / "published" / "mine"
    published.mkdir(parents=True)
    (published / "manifest.json").write_text("{}")
    assert t5_pretrain("run", "smoke", "--name", "mine") == 2
    assert "(corpus.split_seed: 2 -> 0; optimizer.seed: 1 -> 0)" in capsys.readouterr().err
    assert not (tmp_path / "work" / "prefect").exists()


def test_more_ranks_than_gpus_are_refused_before_anything_starts(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ["cluster.accelerator=cuda", "cluster.ranks=64", "layout.micro_batch_sequences=1"]
    assert t5_pretrain("run", "smoke", *(word for setting in asked for word in ("--set", setting))) == 2
    assert "GPUs that torch can use. Reduce cluster.ranks" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("given", [(), ("--set", "corpus.source=pydocs")], ids=["without a text", "without a GPU"])
def test_a_run_that_this_machine_cannot_make_is_refused_with_how_to_try_the_recipe(
    t5_pretrain: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: tuple[str, ...],
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert t5_pretrain("run", "moe", *given) == 2
    assert "with a tiny model, add --trial to the same command" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_accelerators_of_another_kind_do_not_count_as_gpus(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 64)
    assert t5_pretrain("run", "smoke", "--set", "cluster.accelerator=cuda") == 2
    assert "this machine has 0 GPUs that torch can use" in capsys.readouterr().err


def test_fp16_on_a_cpu_that_does_not_support_it_is_refused_before_anything_starts(
    t5_pretrain: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    asked = ["optimizer.precision=fp16", "layout.zero_stage=1", "cluster.accelerator=cpu"]
    assert t5_pretrain("run", "smoke", *(word for setting in asked for word in ("--set", setting))) == 2
    assert "this machine's CPU has no instructions for it" in capsys.readouterr().err
    assert not (tmp_path / "work/prefect").exists()


def test_text_that_does_not_fit_under_the_root_is_refused_before_anything_starts(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with open(tmp_path / "text.txt", "wb") as file:
        file.write(b"a line of text\n" * (LOOK_BYTES // 14 + 2))
        file.truncate(1 << 43)  # sparse from here on, and not read any further
    assert t5_pretrain("run", "smoke", "--set", "corpus.source=text.txt") == 5
    assert "choose another root" in capsys.readouterr().err


def test_exit_code_3_means_that_training_is_done_but_its_result_is_not_gathered(
    t5_pretrain: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose_a_host(**_: object) -> None:
        raise NotGathered("training is done, but node1 was lost")

    monkeypatch.setattr(__main__, "app", lose_a_host)
    assert t5_pretrain("run") == 3
    assert capsys.readouterr().err == "error: training is done, but node1 was lost\n"


@pytest.mark.parametrize("command", ["run", "train"])
def test_a_start_after_an_unfinished_begin_again_is_refused_with_how_to_repeat_or_withdraw_it(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    folder = tmp_path / "work" / "runs" / "mine"
    folder.mkdir(parents=True)
    ask_to_begin_again(folder)
    shards = tmp_path / "work" / "shards" / "some"
    shards.mkdir(parents=True)
    TokenShards(path=shards, fingerprint="0", files={}).commit()
    assert t5_pretrain(command, "smoke", "--name", "mine", "--set", "corpus.source=/nowhere") == 2
    output = capsys.readouterr().err
    assert "Repeat --begin-again" in output
    assert f"remove {folder / 'begin-again'}" in output
    assert "Traceback" not in output
