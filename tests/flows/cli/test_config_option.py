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

Planned = Callable[..., dict[str, Any]]
Printed = Callable[..., str]


@pytest.fixture
def planned(t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Planned:
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


SEEDS = "recipe: smoke\nname: mine\noptimizer:\n  seed: 1\n  num_steps: 100\nstorage:\n  root: from-file\n"


def test_a_file_overrides_the_recipe_and_options_override_the_file(planned: Planned, tmp_path: Path) -> None:
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


def test_options_work_with_a_file_that_sets_everything(printed: Printed, planned: Planned) -> None:
    file = write(printed("init", "smoke", "--set", "cluster.ranks=1"))
    write("node1 slots=2\nnode2 slots=2\n", "hosts")
    hosts = planned("--config", file, "--hostfile", "hosts", "--set", "layout.micro_batch_sequences=16")
    assert hosts["spec"]["cluster"]["ranks"] == 4
    assert hosts["hosts"] == [{"name": "node1", "slots": [0, 1]}, {"name": "node2", "slots": [0, 1]}]


def test_a_recipe_can_be_named_beside_a_file(planned: Planned) -> None:
    file = write(SEEDS)
    assert planned("smoke", "--config", file) == planned("--config", file)
    assert planned("base", "--config", write("optimizer:\n  seed: 7\n", "part.yaml"))["recipe"] == "base"


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if not recipe().is_fine_tuning])
def test_the_file_that_init_writes_plans_what_the_recipe_plans(printed: Printed, planned: Planned, name: str) -> None:
    assert planned("--config", write(printed("init", name))) == planned(name)
    file = write(printed("init", name, "--set", "optimizer.seed=5", "--set", "corpus.source=a.txt"))
    changed = build(planned("--config", file)["spec"])
    assert (changed.optimizer.seed, changed.corpus.source) == (5, "a.txt")


def test_the_unchanged_file_of_a_recipe_for_gpus_is_refused_until_it_names_a_text(
    printed: Printed, refused: Callable[..., str], tmp_path: Path
) -> None:
    command = ("run", "--config", write(printed("init", "base")), "--set", "cluster.accelerator=cpu")
    assert "recipe 'base' needs text to train on: name a file" in refused(2, *command)
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize("settings", [{}, {"name": "mine"}, {"optimizer.seed": 3, "corpus.source": "text/*.txt"}])
def test_the_file_stored_with_a_run_continues_that_run_from_any_folder(
    planned: Planned,
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


def test_a_stage_takes_text_and_root_from_a_file(printed: Printed, refused: Callable[..., str], tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        write("".join(f"line {number} of {name}\n" for number in range(200)), name)
    file = write("recipe: base\ncorpus:\n  source: a.txt\nstorage:\n  root: made\n")
    assert printed("corpus", "--config", file).startswith(f"corpus: {tmp_path / 'made/corpus'}")
    other = printed("corpus", "--config", file, "--corpus", "b.txt", "--root", "other")
    assert other.startswith(f"corpus: {tmp_path / 'other/corpus'}")
    assert f"no token shards under {tmp_path / 'made/shards'}" in refused(4, "train", "--config", file)


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
    printed: Printed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = []
    monkeypatch.setattr(run_command, "RunParameters", lambda **parameters: made.append(parameters) or 1 / 0)
    file = write(printed("init", "smoke", "--set", "optimizer.seed=5", "--set", "name=mine"))
    with pytest.raises(ZeroDivisionError):
        run_command.run(config=Path(file))
    (parameters,) = made
    assert parameters["settings"] == {"optimizer.seed": 5, "corpus.source": '"pydocs"'}
    assert (parameters["recipe"], parameters["run_name"], parameters["root"]) == ("smoke", "mine", tmp_path / "work")


def test_the_stored_file_is_neither_garbage_nor_in_the_way_of_verification(
    printed: Printed, tmp_path: Path, shards: TokenShards
) -> None:
    spec = recipe("smoke", {"storage.root": str(tmp_path / "work"), "name": "mine"})
    open_run(spec, shards)
    Checkpoint(path=spec.run_folder, fingerprint="0" * 64, files={}, step=1, tag="step-00000001").commit()
    assert json.loads(printed("gc", "--json"))["found"] == []
    assert printed("verify", str(spec.run_folder))
