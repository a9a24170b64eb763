"""Faults in the training code, planted in every process of a command. For ``regression_faults.py``.

``environment_of(fault, folder)`` returns a PYTHONPATH with a ``sitecustomize.py``, which every Python process imports
when it starts. It calls ``plant``, which changes one real function as soon as its module is imported. The peer imports
none of these modules, so that no fault changes it. ``make_cases_small``, ``measure_once`` and ``time_few_steps`` are no
faults: they make a night shorter.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

_ROOT = Path(__file__).parents[2]
FACTOR = 2.0
SLOWER, LARGER = 0.3, 0.2
SEEN_TWICE_STEP = 40
SAVE_SECONDS, WAIT_SECONDS = 4.0, 1.0
NEW_TORCH = "99.0"


def double_learning_rate(engine: Any) -> None:
    """The optimizer gets twice the rate that the metrics report."""
    original = engine.set_learning_rate
    engine.set_learning_rate = lambda of, rate: original(of, FACTOR * rate)


def see_a_batch_twice(loader: Any) -> None:
    """Step 40 trains on the samples of step 39, but reports its own sample ids, so that no sanity check sees it."""
    original = loader.Samples.batch

    def batch(self: Any, start: int, count: int) -> Any:
        made = original(self, start, count)
        first = (SEEN_TWICE_STEP - 1) * _BATCH
        if self._is_trained and first <= start < first + _BATCH:
            return original(self, start - _BATCH, count)._replace(sample_ids=made.sample_ids)
        return made

    loader.Samples.batch = batch


_BATCH = 32


def drop_out_in_evaluation(forward_backward: Any) -> None:
    """Validation runs with dropout active."""
    from torch import nn

    passes = forward_backward.WholePasses
    original = passes.token_losses

    def token_losses(self: Any, batches: Any) -> Any:
        evaluate = self._model.eval

        def all_but_dropout() -> None:
            evaluate()
            for module in self._model.modules():
                if isinstance(module, nn.Dropout):
                    module.train()

        self._model.eval = all_but_dropout
        try:
            return original(self, batches)
        finally:
            del self._model.eval

    passes.token_losses = token_losses


def slow_down(forward_backward: Any) -> None:
    """Every step computes for 30% longer."""
    passes = forward_backward.WholePasses
    original = passes.step

    def step(self: Any, batches: Any) -> Any:
        started = time.process_time()
        since = min(getattr(self, "ended", started), started)
        result = original(self, batches)
        until = time.process_time() + SLOWER * min(time.process_time() - since, 2 * (time.process_time() - started))
        while time.process_time() < until:
            pass
        self.ended = time.process_time()
        return result

    passes.step = step


def use_more_memory(loop: Any) -> None:
    """Every rank keeps a buffer of 20% of its memory."""
    import numpy as np

    original = loop.Trainer.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        self.kept = np.ones(int(LARGER * loop.peak_host_memory_bytes()), dtype=np.uint8)

    loop.Trainer.__init__ = init


def lose_a_tensor(tensor_writer: Any) -> None:
    """Consolidation writes all tensors but the last."""
    original = tensor_writer.write_tensors
    tensor_writer.write_tensors = lambda tensors, *others, **named: original(list(tensors)[:-1], *others, **named)


def lose_moments(saving: Any) -> None:
    """A resumed run starts with Adam's first moments at zero."""
    from t5train.engine.partitions import inner_optimizer

    original = saving.resume

    def resume(engine: Any, *others: Any) -> int:
        step = int(original(engine, *others))
        for state in inner_optimizer(engine).state.values():
            if step and "exp_avg" in state:
                state["exp_avg"].zero_()
        return step

    saving.resume = resume


def delayed(name: str, seconds: float) -> Callable[[Any], None]:
    """Every call of a function of the module takes longer, but no CPU time."""

    def change(module: Any) -> None:
        original = getattr(module, name)

        def later(*arguments: Any, **named: Any) -> Any:
            time.sleep(seconds)
            return original(*arguments, **named)

        setattr(module, name, later)

    return change


def upgrade_torch(baselines: Any) -> None:
    """The machine has another version of torch than the baseline."""
    original = baselines.version
    baselines.version = lambda package: NEW_TORCH if package == "torch" else original(package)


def double_losses(forward_backward: Any) -> None:
    """Every step computes twice the loss."""
    passes = forward_backward.WholePasses
    original = passes.step

    def step(self: Any, batches: Any) -> Any:
        result = original(self, batches)
        return result._replace(loss=FACTOR * result.loss)

    passes.step = step


def make_cases_small(text: str) -> Callable[[Any], None]:
    """Each case of a night is trained and timed once, not two or three times, by a single rank, on a text."""
    small: dict[str, Any] = {"corpus.source": text, "tokenizer.vocab_size": 300, "cluster.ranks": 1}
    small |= {"optimizer.global_batch_sequences": 4, "layout.micro_batch_sequences": 4}

    def change(regression_cases: Any) -> None:
        cases = regression_cases.CASES
        regression_cases.CASES = tuple(replace(case, settings={**case.settings, **small}, repeats=1) for case in cases)

    return change


def measure_once(night_run: Any) -> None:
    """No case is measured once more because it seems slower: other programs take turns on the same cores."""
    night_run.Night._is_slower = lambda *_: False


def time_few_steps(case_run: Any) -> None:
    """The peer takes a few steps, not 60: too few for a time that is worth comparing."""
    case_run.PEER_STEPS = 10


class Planted(NamedTuple):
    """A fault: where it is planted, the case that runs, and what the finding must be about and contain."""

    module: str
    change: Callable[[Any], None]
    case: str
    about: str
    what: str
    says: str = ""
    is_upgrade: bool = False
    """Whether the night also has another version of torch than the baseline."""


_ENGINE, _CHECKPOINT = "t5train.engine", "t5train.checkpoint"
FAULTS = {
    "learning-rate": Planted(f"{_ENGINE}.engine", double_learning_rate, "smoke", "loss", "learning rate doubled"),
    "batch-twice": Planted(
        "t5train.data.samples.loader", see_a_batch_twice, "smoke", "loss", "step 40 sees step 39's batch",
    ),
    "dropout": Planted(
        f"{_ENGINE}.forward_backward", drop_out_in_evaluation, "moe", "loss", "dropout left on in evaluation",
    ),
    "slow-step": Planted(f"{_ENGINE}.forward_backward", slow_down, "smoke", "time", "a step computes 30% longer"),
    "memory": Planted("t5train.train.loop", use_more_memory, "smoke", "memory", "a rank keeps 20% more memory"),
    "lost-tensor": Planted(
        f"{_CHECKPOINT}.consolidate.tensor_writer", lose_a_tensor, "smoke", "failure", "consolidation loses one tensor",
    ),
    "lost-moments": Planted(f"{_CHECKPOINT}.saving", lose_moments, "smoke", "failure", "resuming loses momentum"),
    "slow-save": Planted(
        f"{_CHECKPOINT}.saving", delayed("begin", SAVE_SECONDS),
        "smoke", "time", "a save takes 4 s longer", "saving a checkpoint",
    ),
    "slow-validation": Planted(
        "t5train.train.validation", delayed("validate", WAIT_SECONDS),
        "smoke", "time", "a validation takes 1 s longer", "a validation",
    ),
    "slow-sharding": Planted(
        "t5train.data.shard_worker", delayed("write_shard", WAIT_SECONDS),
        "smoke", "time", "a token shard takes 1 s longer", "sharding",
    ),
    "new-torch": Planted(
        f"{_ENGINE}.forward_backward", double_losses, "smoke", "loss", "a new torch doubles the losses",
        says=f"-> {NEW_TORCH}", is_upgrade=True,
    ),
}  # fmt: skip


class _AfterImport(MetaPathFinder):
    """Changes a module once, right after it has been imported."""

    def __init__(self, module: str, change: Callable[[Any], None]) -> None:
        self._module, self._change = module, change

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        vars(spec.loader)["exec_module"] = execute_and_change
        return spec


def plant(name: str | None, small_text: str | None) -> None:
    """Plant a fault in this process, if one is named. If a text is given, nights are short ones on that text."""
    if name is not None:
        plant_after_import(FAULTS[name].module, FAULTS[name].change)
        if FAULTS[name].is_upgrade:
            plant_after_import("t5train.regression.baselines", upgrade_torch)
    if small_text is not None:
        plant_after_import("t5train.regression.regression_cases", make_cases_small(small_text))
        plant_after_import("infra.head.regression.night_run", measure_once)
        plant_after_import("infra.head.regression.case_run", time_few_steps)


def plant_after_import(module: str, change: Callable[[Any], None]) -> None:
    """Let this process change a module right after it has imported it."""
    sys.meta_path.insert(0, _AfterImport(module, change))


def environment_of(name: str | None, folder: Path, *, small_text: Path | None = None) -> dict[str, str]:
    """Return the environment of a command with a fault in all its processes; ``folder`` gets ``sitecustomize.py``."""
    text = None if small_text is None else str(small_text)
    code = f"from tests.acceptance.planted_faults import plant\n\nplant({name!r}, {text!r})\n"
    return {**os.environ, "PYTHONPATH": with_first_import(code, folder)}


def with_first_import(code: str, folder: Path) -> str:
    """Return a PYTHONPATH with which every Python process executes ``code`` first, and write that into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(code, "utf-8")
    paths = [str(folder), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(path for path in paths if path)
