"""What a run does with its checkpoints on storage that its ranks share: select, save and prune."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.acceptance.io_faults.evidence import complete_tags, missing, tree
from tests.acceptance.io_faults.small_run import STEPS, UNFINISHED, SmallRun, become_only_rank, train_one_step
from tests.acceptance.io_faults.trial import Ending, warnings_as_errors

_KEPT_BY_PRUNING = STEPS[-2:]


class _OnTags:
    """An operation on the checkpoints of the small run."""

    def __init__(self, small_run: SmallRun) -> None:
        self._small_run = small_run
        self._tags = {step: tree(small_run.tag(step)) for step in STEPS}

    def prepare(self, folder: Path) -> None:
        """Make several complete checkpoints, and one whose save was killed."""
        run = self._small_run.copy_to(folder, without=("witness", "weights", "tensorboard"))
        run.leave_unfinished()

    def _lost(self, folder: Path, steps: tuple[int, ...] = STEPS) -> list[str]:
        run = SmallRun(folder)
        before = {str(run.tag(step).relative_to(folder)): self._tags[step] for step in steps}
        return [f"lost: {name}" for name in missing(before, folder)]


class Select(_OnTags):
    """The head selects the newest complete checkpoint, verifies it, and writes the job of the next attempt."""

    name = "select"

    def prepare(self, folder: Path) -> None:
        """Add a folder for the attempt."""
        super().prepare(folder)
        self._attempt(folder).mkdir(parents=True)

    def set_up(self, folder: Path) -> Callable[[], Any]:
        """Load the shards beforehand: the stage that made or reused them has verified them."""
        from t5train.checkpoint.resume import write_job

        run, shards = SmallRun(folder), SmallRun(folder).shards
        return lambda: write_job(run.spec, shards, self._attempt(folder)) and None

    def problems(self, folder: Path, ending: Ending, failed: list[str]) -> list[str]:  # noqa: ARG002 - part of Operation
        """The job names the newest complete checkpoint."""
        from t5train.files.run_folder import tag_of
        from t5train.spec.rank_job import TrainJob

        found = self._lost(folder)
        if ending.succeeded:
            chosen = TrainJob.read(self._attempt(folder) / "spec.json").resume_tag
            found += [f"wrong: {chosen} was chosen"] * (chosen != tag_of(STEPS[-1]))
        return found

    def _attempt(self, folder: Path) -> Path:
        return SmallRun(folder).folder / "attempts" / "0002"


class Save(_OnTags):
    """A rank saves a checkpoint over an unfinished one of the same step."""

    name = "save"

    def set_up(self, folder: Path) -> Callable[[], Any]:
        """Train one step, so that the engine has something to save."""
        from t5train.checkpoint import saving

        job = SmallRun(folder).job()
        become_only_rank()
        trainer = train_one_step(job)
        described = saving.Described(trainer.huggingface_config, trainer.shards.fingerprint)

        def save() -> None:
            saving.begin(trainer.engine, job, UNFINISHED, described)()
            saving.note_saved(job, UNFINISHED)

        return save

    def problems(self, folder: Path, ending: Ending, failed: list[str]) -> list[str]:  # noqa: ARG002 - part of Operation
        """If the save succeeded, the checkpoint is complete. The project takes it for complete only if it is."""
        from t5train.checkpoint import tags
        from t5train.files.run_folder import tag_of

        run, tag = SmallRun(folder), tag_of(UNFINISHED)
        found, complete = self._lost(folder), complete_tags(run.checkpoints)
        if ending.succeeded and tag not in complete:
            found.append(f"wrong: {tag} was saved but is not complete")
        if tag in tags.complete_tags(run.checkpoints) and tag not in complete:
            found.append(f"wrong: {tag} is treated as complete but is not")
        return found


class Prune(_OnTags):
    """Rank 0 prunes old checkpoints."""

    name = "prune"

    def prepare(self, folder: Path) -> None:
        """Beside the tags, leave an interrupted removal, a user's copy, and a consolidated checkpoint."""
        super().prepare(folder)
        run = SmallRun(folder)
        run.tag(UNFINISHED).rename(run.tag(STEPS[-1] - 1))
        shutil.copytree(run.tag(STEPS[0]), run.checkpoints / "removed-0123abcd")
        shutil.copytree(run.tag(STEPS[0]), run.checkpoints / "step-00000002-good")
        (run.folder / "relayout" / "step-00000002-0123456789ab").mkdir(parents=True)
        (run.folder / "relayout" / "step-00000002-0123456789ab" / "model.safetensors").write_bytes(bytes(100))

    def set_up(self, folder: Path) -> Callable[[], Any]:
        """Prune as after the save of the last step."""
        from t5train.checkpoint import saving

        run = SmallRun(folder)
        spec = run.spec.with_settings({"storage.keep_last": len(_KEPT_BY_PRUNING)})
        job = run.job(resume_step=STEPS[-2]).model_copy(update={"spec": spec})

        def prune() -> None:
            with mock.patch.object(saving, "rank", return_value=0), warnings_as_errors(saving.__name__):
                saving.prune(job, STEPS[-1])

        return prune

    def problems(self, folder: Path, ending: Ending, failed: list[str]) -> list[str]:  # noqa: ARG002 - part of Operation
        """Checkpoints to keep and the user's copy are still there.

        If pruning succeeded, no interrupted removal is left.
        """
        run = SmallRun(folder)
        found = self._lost(folder, _KEPT_BY_PRUNING)
        copy = str((run.checkpoints / "step-00000002-good").relative_to(folder))
        found += [f"lost: {name}" for name in missing({copy: self._tags[STEPS[0]]}, folder)]
        if ending.succeeded and (remaining := sorted(run.checkpoints.glob("removed-*"))):
            found.append(f"wrong: {remaining[0].name} was not removed")
        return found
