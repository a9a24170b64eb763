"""The commands in training-speed.md name recipes, settings and options that exist, and valid numbers of ranks."""

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import pair_training
from benchmarks.comparison import spec_for
from benchmarks.peer_outcomes import ALONE, DENSE, OURS
from benchmarks.training_peers import CONTENDERS
from benchmarks.whole_machine import _arguments as whole_machine_arguments
from flows.spec_from_recipe import resolve

DOCUMENT = Path(__file__).parents[2] / "docs/evidence/training-speed.md"
ALL_COMMANDS = re.findall(r"^python -m benchmarks\.(\w+) (.*)$", DOCUMENT.read_text("utf-8"), re.MULTILINE)
COMMANDS = [command for command in ALL_COMMANDS if command[0] != "whole_machine"]


def test_one_gpu_four_and_eight_are_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {module for module, _ in COMMANDS} == {
        *("training_peers", "training_scaling", "loss_curves", "pair_training")
    }
    (whole_machine,) = set(ALL_COMMANDS) - set(COMMANDS)
    monkeypatch.setattr(sys, "argv", [whole_machine[0], *shlex.split(whole_machine[1], comments=True)])
    given = whole_machine_arguments()
    assert (given.ranks, given.until_seconds) == (8, 540)
    assert len(given.only) == 7
    assert {"base", "large", "moe", "t5_3b", "pipeline", "finetune_base"} == {
        arguments.split()[0] for _, arguments in COMMANDS
    }


@pytest.mark.parametrize(("module", "arguments"), COMMANDS)
def test_a_documented_command_is_valid(module: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [module, *shlex.split(arguments, comments=True)])
    given = importlib.import_module(f"benchmarks.{module}")._arguments()
    settings = dict(change.split("=", 1) for change in given.set)
    if given.ranks:
        settings["cluster.ranks"] = str(given.ranks)
    spec = resolve(given.recipe, settings)
    assert given.until_seconds == 570
    if module == "training_scaling":
        alone = spec_for(spec, ALONE)
        assert alone.cluster.ranks * spec.cluster.ranks == 4
        assert alone.optimizer.global_batch_sequences * 4 == spec.optimizer.global_batch_sequences
    if module == "pair_training":
        assert {*given.only.split(",")} <= {*pair_training.CONTENDERS}
        return
    for contender in (getattr(given, "only", None) or OURS).split(","):
        assert contender in CONTENDERS
        assert (spec_for(spec, contender).model.moe.num_experts > 0) == (given.recipe == "moe" and contender != DENSE)
