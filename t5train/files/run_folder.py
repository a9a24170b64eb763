"""Names of files in a run's folder, ``{root}/runs/{run_name}``, and environment variables with paths for a rank.

Standard library only, as guards import it.
"""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from t5train.errors import UnlistedFile

RUNS = "runs"  # folder under the root with a folder for each run
PUBLICATIONS = "published"  # folder under the root with a folder for each run that is published there
RUN = "run.json"  # the spec and identity that the run was begun with
CONFIG = "config.yaml"  # the settings with which the run was started last, as a configuration file that starts it again
METRICS = "metrics.jsonl"  # one JSON line per step
TENSORBOARD = "tensorboard"  # folder with the same metrics for TensorBoard
METRICS_CSV = "metrics.csv"  # the same metrics as a table, if monitor.csv is true
WANDB = "wandb"  # folder with what was sent to Weights & Biases, or is to be sent later, if monitor.wandb is true
WANDB_SENT = f"{WANDB}/sent.json"  # file with the id of the W&B run, and the last step that it got
PROFILES = "profiles"  # folder with the profiler traces of the steps in profile.steps
MONITORED = (METRICS, METRICS_CSV, TENSORBOARD, PROFILES, WANDB)  # what rank 0 writes for people to watch training
CHECKPOINTS = "checkpoints"
"""DeepSpeed's save folder, with one folder per tag."""
STORING = "storing"  # folder with links to the files of checkpoints that are being copied to an object store
SET_ASIDE = "set-aside"
"""Folder for files that must be neither used nor deleted, such as a damaged checkpoint; beside a run's checkpoints."""
LAST_COMPLETE = "last-seen.json"  # the last checkpoint that was known to be complete
BEGIN_AGAIN = "begin-again"  # file that asks the next start to move all checkpoints aside and to begin at step 0
BEGINNINGS = "beginnings.json"
"""JSON list with an id for each time that the run has begun again; missing if it never has."""
NOT_BEGUN_AGAIN = "not-begun-again.json"
"""Hosts that did not answer when the run began again, so that they still have checkpoints from before."""
RESHARDED = "relayout"
"""Folder with the consolidated checkpoint that ranks of another layout begin from, until they have saved their own."""
ATTEMPTS = "attempts"  # folder with one folder for each start of the ranks
LAST_START = "last-start.json"
"""The process that held the run last, and how that ended (infra.head.launch.start_record)."""
FAILURES = "failures.jsonl"  # one JSON line for each failure of an attempt (infra.head.retries)
CLAIM = ".claim"  # in the folder of a data stage: for which result it is
ATTEMPT_SPEC = "spec.json"  # in the folder of an attempt: the job of its ranks
WITNESS_FOLDER = "witness"  # folder with the witness: what the engine recorded of its own weights at the last step
WEIGHTS = "weights"  # folder with one folder of safetensors files for each consolidated checkpoint
EXPORT = "export"  # the Hugging Face folder
PREDICTIONS = "predictions"  # folder with what was predicted for held-out pairs, of which the export has the result
PUBLISHED = "published.json"  # where the run was published last
REPORT = "report"
"""Folder with what people read about the run: its data, plot of training, proof, summary, and last failure."""
_TAG = re.compile("step-[0-9]{8}")
_REMOVED = "removed-"


def tag_of(step: int) -> str:
    """The name of a step's checkpoint, such as ``step-00000400``."""
    return f"step-{step:08d}"


def step_of(tag: str) -> int:
    """The step of a tag made by ``tag_of``."""
    return int(tag.removeprefix("step-"))


def is_tag(name: str) -> bool:
    """Whether a folder of this name is a run's checkpoint. A folder with any other name belongs to the user."""
    return _TAG.fullmatch(name) is not None


def name_while_removed(token: str) -> str:
    """The name of a checkpoint's folder while it is being removed; ``token`` is eight hexadecimal digits."""
    return f"{_REMOVED}{token}"


def removing(run_folder: Path) -> Path:
    """The path of a deleted run whose copies on hosts may still have to be deleted."""
    return run_folder.with_name(f".{run_folder.name}.removing")


def discarded(run_folder: Path) -> Path:
    """The path of a deleted run of which only files here are left, as t5train.files.atomic names discarded folders."""
    return run_folder.with_name(f".{run_folder.name}.discarded")


def is_tag_or_removed(name: str) -> bool:
    """Whether the name is that of a checkpoint, or of a checkpoint whose removal was interrupted."""
    return is_tag(name) or re.fullmatch(f"{_REMOVED}[0-9a-f]{{8}}", name) is not None


RANK_FILES = "T5_RANK_FILES"  # prefix of the paths of the rank's own files: ``.../rank-00003``
LOCKS = "T5_LOCKS"  # this machine's folder of locks on accelerators


def unlisted(found: Iterable[str], recorded: Collection[str]) -> list[str]:
    """The pickles among the names ``found`` in a tag's folder that are not recorded, sorted."""
    return sorted(name for name in found if name.endswith(".pt") and name not in recorded)


def require_listed(where: str, found: Iterable[str], recorded: Collection[str]) -> None:
    """Raise UnlistedFile if a tag holds a pickle that was not recorded. DeepSpeed finds files by pattern."""
    if strangers := unlisted(found, recorded):
        raise UnlistedFile(
            f"{where} holds {strangers[0]}, a file that no rank recorded. DeepSpeed would load it and run any code "
            "that it contains. Move the file away, then start again. Nothing was changed"
        )
