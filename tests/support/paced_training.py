"""Training that goes on slowly, without computing, until a test has seen what it shows.

``environment_of(folder)`` returns a PYTHONPATH with a ``sitecustomize.py``, which every Python process imports when it
starts. In ranks, each step then begins with a pause, and the step HELD with a wait, until ``go_on(folder)`` is called.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.acceptance.planted_faults import plant_after_import, with_first_import

HELD = 180
_SECONDS = 0.5
_GO_ON = "go-on"


def environment_of(folder: Path) -> dict[str, str]:
    """Return the variables of a command whose ranks are to be paced."""
    code = f"from tests.support import paced_training\n\npaced_training.pace({str(folder)!r})\n"
    return {"PYTHONPATH": with_first_import(code, folder)}


def go_on(folder: Path) -> None:
    """Let the ranks train without pauses."""
    (folder / _GO_ON).touch()


def pace(folder: str) -> None:
    """Make the steps of this process slow, if it is a rank."""
    plant_after_import("t5train.engine.forward_backward", _paced(Path(folder) / _GO_ON))


def _paced(go_on_file: Path) -> Callable[[Any], None]:
    def change(forward_backward: Any) -> None:
        for passes in (forward_backward.WholePasses, forward_backward.PipelinePasses):
            passes.step = _slow(passes.step, go_on_file)

    return change


def _slow(original: Callable[[Any, Any], Any], go_on_file: Path) -> Callable[[Any, Any], Any]:
    taken = 0

    def step(self: Any, batches: Any) -> Any:
        nonlocal taken
        taken += 1
        if not go_on_file.exists():
            time.sleep(_SECONDS)
        while taken == HELD and not go_on_file.exists():
            time.sleep(_SECONDS)
        return original(self, batches)

    return step
