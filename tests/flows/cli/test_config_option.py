"""``--config`` takes recipe and settings from a file, ``init`` writes one, and a run stores one that continues it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.cli import run_command
from t5train.checkpoint.resume import open_run, write_job
from t5train.records.stage_records import Checkpoint, TokenShards
from t5train.spec import RunSpec, build
from t5train.spec.config_file import read_config
from t5train.spec.recipes import RECIPES, recipe

Run = Callable[..., int]


@pytest.fixture
def planned(t5_pretrain: Run, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Return what a dry run with these options plans."""

    def plan(*arguments: str) -> dict[str, Any]:
        code, output = t5_pretrain("run", *arguments, "--dry-run", "--json"), capsys.readouterr()
        planned: dict[str, Any] = json.loads(output.out)
        refused = planned["refused"]  # without accelerators, recipes for GPUs are planned and refused
        assert (code in {2, 4}, output.err) == ((True, f"error: {refused}\n") if refused else (False, ""))
        del planned["disk_free_bytes"]  # changes from one moment to the next
        return planned

    return plan


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    return TokenShards(path=tmp_path / "shards", fingerprint="5" * 64, files={})


def write(text: str, name: str = "run.yaml") -> str:
    Path(name).write_text(text, "utf-8")
    return name


def unboxed(text: str) -> str:
    """Text that typer printed in a box, on one line."""
    return " ".join(text.replace("│", " ").split())


SEEDS = "recipe: smoke\nname: mine\noptimizer:\n  seed: 1\n  num_steps: 100\nstorage:\n  root: from-file\n"


def test_a_file_overrides_the_recipe_and_options_override_the_file(
    planned: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    file = write(SEEDS)
    plain = planned("--config", file)
    assert (plain["recipe"], plain["name"]) == ("smoke", "mine")
    assert plain["spec"]["optimizer"]["seed"] == 1
    assert plain["spec"]["optimizer"]["warmup_steps"] == 40
    assert plain["run_folder"] == str(tmp_path / "from-file/runs/mine")
    changed = planned(
        "--config", file, "--set", "optimizer.seed=2", "--set", "storage.root=from-set", "--name", "other"
    )
    assert changed["spec"]["optimizer"]["seed"] == 2
    assert changed["spec"]["optimizer"]["num_steps"] == 100
    assert changed["run_folder"] == str(tmp_path / "from-set/runs/other")
    of_option = planned("--config", file, "--root", "from-option", "--set", "storage.root=from-set")
    assert of_option["run_folder"] == str(tmp_path / "from-option/runs/mine")
    assert planned("--config", file, "--set", "name=renamed")["name"] == "renamed"


def test_options_work_with_a_file_that_sets_everything(
    t5_pretrain: Run, capsys: pytest.CaptureFixture[str], planned: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    assert t5_pretrain("init", "smoke", "--set", "cluster.ranks=1") == 0
    file = write(capsys.readouterr().out)
    write("node1 slots=2\nnode2 slots=2\n", "hosts")
    hosts = planned("--config", file, "--hostfile", "hosts", "--set", "layout.micro_batch_sequences=16")
    assert hosts["spec"]["cluster"]["ranks"] == 4
    assert hosts["hosts"] == [{"name": "node1", "slots": [0, 1]}, {"name": "node2", "slots": [0, 1]}]


def test_a_number_of_ranks_that_contradicts_the_hostfile_is_named_with_its_line(
    t5_pretrain: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    write("node1 slots=2\n", "hosts")
    file = write("recipe: smoke\ncluster:\n  hostfile: hosts\n  ranks: 3\n")
    assert t5_pretrain("run", "--config", file, "--dry-run") == 2
    assert "error: run.yaml, line 4: cluster.ranks is 3, but the hosts chosen from" in capsys.readouterr().err


def test_a_recipe_and_a_file_must_agree(
    t5_pretrain: Run, capsys: pytest.CaptureFixture[str], planned: Callable[..., dict[str, Any]]
) -> None:
    file = write(SEEDS)
    assert planned("smoke", "--config", file) == planned("--config", file)
    assert t5_pretrain("run", "base", "--config", file, "--dry-run") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the command line names the recipe 'base', but run.yaml, line 1 names 'smoke': leave")
    of_base = write("optimizer:\n  seed: 7\n", "part.yaml")
    assert planned("base", "--config", of_base)["recipe"] == "base"
    assert t5_pretrain("run", "--config", of_base) == 2
    assert "part.yaml names no recipe: add a line such as `recipe: smoke`" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "train", "bench"])
def test_a_command_with_neither_recipe_nor_file_is_wrong_usage(
    t5_pretrain: Run, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert t5_pretrain(command) == 2
    assert "name a recipe (see `t5-pretrain recipes`), or a file with --config" in unboxed(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe: smok", "run.yaml, line 1: unknown recipe 'smok' (did you mean 'smoke'?); choose one of smoke, small"),
        ("recipe: smoke\noptimizer:\n  sed: 1", "run.yaml, line 3: unknown setting 'optimizer.sed' (did you mean"),
        ("recipe: smoke\noptimizer:\n  seed: x", "run.yaml, line 3: optimizer.seed is 'x': it must be a whole number"),
        ("recipe: smoke\noptimizer:\n  seed: null", "run.yaml, line 3: optimizer.seed is null: it must be a whole"),
        (
            "recipe: smoke\nmodel:\n  version: 1.1",
            "run.yaml, line 3: model.version is 1.1: it must be one of v1.1, v1.0",
        ),
        ("recipe: smoke\nmodel:\n  compile: 2", "run.yaml, line 3: model.compile is 2: it must be true or false"),
        ("recipe: smoke\nlayout:\n  offload: no", "run.yaml, line 3: layout.offload is 'no': it must be one of none"),
        (
            "recipe: smoke\noptimizer:\n  num_steps: 9",
            "run.yaml, line 3: optimizer.warmup_steps is 40: it must be below",
        ),
        ("recipe: smoke\ncluster:\n  environment: A", "line 3: cluster.environment is 'A': it must be a list of text"),
        (
            "recipe: smoke\nname: a/b",
            "run.yaml, line 2: name is 'a/b': it must be text of at most 80 of the characters",
        ),
        (
            "recipe: smoke\noptimizer:\n  peak_learning_rate: 1e999",
            "line 3: optimizer.peak_learning_rate is inf: it must",
        ),
        ("", "run.yaml has no settings"),
    ],
)
@pytest.mark.parametrize("command", ["run", "train", "preflight", "bench", "corpus", "tokenizer"])
def test_a_wrong_file_ends_every_command_with_one_line_that_names_it(
    t5_pretrain: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, text: str, message: str
) -> None:
    assert t5_pretrain(command, "--config", write(text)) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert message in output.err
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_a_file_cannot_be_combined_with_a_trial(t5_pretrain: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert t5_pretrain("run", "--config", write(SEEDS), "--trial") == 2
    assert "use `run RECIPE --trial`" in unboxed(capsys.readouterr().err)


@pytest.mark.parametrize("name", RECIPES)
def test_the_file_that_init_writes_plans_what_the_recipe_plans(
    t5_pretrain: Run, capsys: pytest.CaptureFixture[str], planned: Callable[..., dict[str, Any]], name: str
) -> None:
    assert t5_pretrain("init", name) == 0
    file = write(capsys.readouterr().out)
    assert planned("--config", file) == planned(name)
    assert t5_pretrain("init", name, "--set", "optimizer.seed=5", "--set", "corpus.source=a.txt") == 0
    changed = build(planned("--config", write(capsys.readouterr().out))["spec"])
    assert (changed.optimizer.seed, changed.corpus.source) == (5, "a.txt")


def test_the_unchanged_file_of_a_recipe_for_gpus_is_refused_until_it_names_a_text(
    t5_pretrain: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert t5_pretrain("init", "base") == 0
    file = write(capsys.readouterr().out)
    assert t5_pretrain("run", "--config", file, "--set", "cluster.accelerator=cpu") == 2
    assert "recipe 'base' needs text to train on: name a file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_init_refuses_what_run_would_refuse(t5_pretrain: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert t5_pretrain("init", "smok") == 2
    assert "unknown recipe 'smok' (did you mean 'smoke'?)" in capsys.readouterr().err
    assert t5_pretrain("init", "smoke", "--set", "optimizer.num_steps=4") == 2
    output = capsys.readouterr()
    assert "optimizer.warmup_steps is 40" in output.err
    assert output.out == ""


@pytest.mark.parametrize("settings", [{}, {"name": "mine"}, {"optimizer.seed": 3, "corpus.source": "text/*.txt"}])
def test_the_file_stored_with_a_run_continues_that_run_from_any_folder(
    planned: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    shards: TokenShards,
    settings: dict[str, Any],
) -> None:
    spec = recipe("smoke", {"storage.root": str(tmp_path / "root"), **settings})
    open_run(spec, shards)
    stored = spec.run_folder / "config.yaml"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = planned("--config", str(stored))
    assert build(again["spec"]).fingerprint() == spec.fingerprint()
    assert (again["name"], again["run_folder"]) == (spec.run_name, str(spec.run_folder))
    assert stored.stat().st_mode == (spec.run_folder / "run.json").stat().st_mode
    assert f"t5-pretrain run --config {stored}" in stored.read_text("utf-8")


def test_the_stored_file_names_the_folder_to_start_from_if_paths_are_relative(
    tmp_path: Path, shards: TokenShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, (source, is_relative) in enumerate(
        [("pydocs", False), ("/data/a.txt", False), ("s3://bucket/a.txt", False), ("data/*.txt", True)]
    ):
        spec = recipe("smoke", {"storage.root": str(tmp_path), "name": str(number), "corpus.source": source})
        open_run(spec, shards)
        assert (f"#     cd {tmp_path}\n" in (spec.run_folder / "config.yaml").read_text("utf-8")) is is_relative


def test_a_stage_takes_text_and_root_from_a_file(
    t5_pretrain: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("a.txt", "b.txt"):
        write("".join(f"line {number} of {name}\n" for number in range(200)), name)
    file = write("recipe: base\ncorpus:\n  source: a.txt\nstorage:\n  root: made\n")
    assert t5_pretrain("corpus", "--config", file) == 0
    first = capsys.readouterr().out
    assert first.startswith(f"corpus: {tmp_path / 'made/corpus'}")
    assert t5_pretrain("corpus", "--config", file, "--corpus", "b.txt", "--root", "other") == 0
    assert capsys.readouterr().out.startswith(f"corpus: {tmp_path / 'other/corpus'}")
    assert t5_pretrain("train", "--config", file) == 4
    assert f"no token shards under {tmp_path / 'made/shards'}" in capsys.readouterr().err


def test_the_stored_file_has_the_settings_of_the_last_start(tmp_path: Path, shards: TokenShards) -> None:
    spec = recipe("smoke", {"storage.root": str(tmp_path / "root"), "name": "mine"})
    open_run(spec, shards)
    one_rank = spec.with_settings({"cluster.ranks": 1})
    write_job(one_rank, shards, tmp_path)
    assert stored_spec(spec) == one_rank
    (spec.run_folder / "config.yaml").unlink()  # as in a run of an earlier version
    open_run(spec, shards)
    write_job(spec, shards, tmp_path)
    assert stored_spec(spec) == spec


def stored_spec(spec: RunSpec) -> RunSpec:
    config = read_config(spec.run_folder / "config.yaml")
    return recipe(str(config.recipe), config.settings)


def test_the_parameters_of_a_run_hold_only_what_differs_from_the_recipe(
    t5_pretrain: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = []
    monkeypatch.setattr(run_command, "RunParameters", lambda **parameters: made.append(parameters) or 1 / 0)
    assert t5_pretrain("init", "smoke", "--set", "optimizer.seed=5", "--set", "name=mine") == 0
    with pytest.raises(ZeroDivisionError):
        run_command.run(config=Path(write(capsys.readouterr().out)))
    (parameters,) = made
    assert parameters["settings"] == {"optimizer.seed": 5, "corpus.source": '"pydocs"'}
    assert (parameters["recipe"], parameters["run_name"], parameters["root"]) == ("smoke", "mine", tmp_path / "work")


def test_the_stored_file_is_neither_garbage_nor_in_the_way_of_verification(
    t5_pretrain: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, shards: TokenShards
) -> None:
    spec = recipe("smoke", {"storage.root": str(tmp_path / "work"), "name": "mine"})
    open_run(spec, shards)
    Checkpoint(path=spec.run_folder, fingerprint="0" * 64, files={}, step=1, tag="step-00000001").commit()
    assert t5_pretrain("gc", "--json") == 0
    assert json.loads(capsys.readouterr().out)["found"] == []
    assert t5_pretrain("verify", str(spec.run_folder)) == 0, capsys.readouterr().err
