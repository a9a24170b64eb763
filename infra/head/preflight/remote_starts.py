"""Models on the Hub or in a bucket that runs start from: a run's settings name the copy under its root."""

import json
from pathlib import Path

from infra.head.preflight.run_checks import require_model
from t5train.host_resources import make_root
from t5train.progress import Progress, silent
from t5train.records.locations import is_remote_model
from t5train.records.start_copy import is_awaited
from t5train.release import remote_start
from t5train.spec import RunSpec


def with_start_here(spec: RunSpec, progress: Progress = silent) -> RunSpec:
    """Return the settings with the copy of a remote model to start from, whose configuration and vocabulary are there.

    Without another vocabulary, the run has that of the model. Raises the errors of ``remote_start.begin``.
    """
    start = spec.model.start_from
    if start is None or not is_remote_model(start):
        return spec
    make_root(spec.storage.root)
    folder = json.dumps(str(remote_start.begin(start, spec.storage.root, progress)))
    own = {"tokenizer.path": folder} if spec.tokenizer.path is None else {}
    return spec.with_settings({"model.start_from": folder} | own)


def complete_start(spec: RunSpec, progress: Progress) -> None:
    """Copy the weights of a remote model to start from, and check that they fit the settings."""
    if spec.model.start_from is not None and is_awaited(folder := Path(spec.model.start_from)):
        remote_start.complete(folder, progress)
        require_model(spec)
