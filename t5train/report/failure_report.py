"""The report on a failed run: first what failed, why, and what to do."""

import traceback
from pathlib import Path
from typing import NamedTuple

from t5train.errors import T5TrainError, encodable
from t5train.files.os_errors import in_one_line
from t5train.files.run_folder import ATTEMPTS
from t5train.release.markdown import code, code_block, escaped, page

_STAGE, _RUN_FOLDER = "failed stage: ", "folder of the run: "


def note_stage(error: BaseException, title: str) -> None:
    """Add to an error the stage that it ended."""
    error.add_note(_STAGE + title)


def note_run_folder(error: BaseException, folder: Path) -> None:
    """Add to an error the folder of the run that it ended."""
    error.add_note(_RUN_FOLDER + str(folder))


class Failure(NamedTuple):
    """Why a run failed. ``stage`` is the title of the stage that failed; None if none had started.

    ``run_folder`` is None if the run was refused before this process had locked its folder.
    """

    error: Exception
    stage: str | None
    run_folder: Path | None

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Return the failure that an error caused, with what was noted on it or on its cause."""
        folder = _noted(error, _RUN_FOLDER)
        return cls(error, _noted(error, _STAGE), Path(folder) if folder else None)

    @property
    def is_expected(self) -> bool:
        """Whether the error is one of this project, whose message says what to do."""
        return isinstance(self.error, T5TrainError)

    @property
    def cause(self) -> str:
        """The cause in one line."""
        return encodable(in_one_line(self.error))

    @property
    def what(self) -> str:
        """What failed."""
        return f"{self.stage} failed" if self.stage else "The run could not start"


def _noted(error: BaseException | None, what: str) -> str | None:
    """Return what was noted on an error or its causes. An error can be its own cause (``raise error from error``)."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(what)]
        if notes:
            return str(notes[0].removeprefix(what))
        seen.append(error)
        error = error.__cause__
    return None


def failure_report(failure: Failure) -> str:
    """Return the report as Markdown."""
    folder = failure.run_folder
    return page(
        f"# {failure.what}",
        f"**Why:** {escaped(failure.cause)}",
        f"**What to do:** {_remedy(failure)}",
        f"The logs of the ranks are in {code(folder / ATTEMPTS)}, one folder for each attempt." if folder else "",
        "" if failure.is_expected else code_block("".join(traceback.format_exception(failure.error))),
    )


def _remedy(failure: Failure) -> str:
    if failure.is_expected:
        return (
            "The message above names it. Then start the same run again: finished stages are verified and reused, and "
            "training resumes from its newest complete checkpoint."
        )
    return (
        "This error is not one that t5-pretrain expects. Its traceback is below. If the cause has gone, start the same "
        "run again: finished stages are verified and reused."
    )
