"""What Prefect and the run's folder show of a failed run: first what failed, why, and what to do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

from prefect.logging import get_run_logger
from prefect.states import Failed

from t5train.report.failure_report import Failure, failure_report, note_run_folder
from t5train.report.report_folder import FAILURE, write_report
from tasks.prefect_log import REPEATED_AT_THE_END
from tasks.run_page import not_disturbing, show_in_title, shown_markdown

P = ParamSpec("P")
R = TypeVar("R")


def showing_failures(function: Callable[P, R]) -> Callable[P, R]:
    """Make the function of a flow report its failure: on the run's page, in an artifact, and in the run's folder.

    The message of the flow's final state begins with what failed and why. The caller of the flow gets the error itself.
    Once the function has ended, also if it was cancelled, the title of the run's page no longer shows progress.
    """

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            # Prefect makes a returned state the final one, and raises its error in the caller of the flow. If the error
            # were raised here, Prefect's own words would precede the cause.
            return cast(R, Failed(message=_show(Failure.of(error)), data=error))
        except BaseException:
            show_in_title(None)
            raise
        show_in_title(None)
        return result

    return wrapped


@contextmanager
def naming_run_folder(folder: Path) -> Iterator[None]:
    """Note the folder of the run on errors in the block, so that the report on them is written there, too."""
    try:
        yield
    except Exception as error:
        note_run_folder(error, folder)
        raise


def _show(failure: Failure) -> str:
    """Show the failure everywhere, and return it in one line."""
    line = f"{failure.what}: {failure.cause}"
    get_run_logger().error(line, exc_info=None if failure.is_expected else failure.error, extra=REPEATED_AT_THE_END)
    text = failure_report(failure)
    if failure.run_folder is not None:
        with not_disturbing("the failure in the run's folder"):
            path = write_report(failure.run_folder, FAILURE, text)
            if not failure.is_expected:
                failure.error.add_note(f"this traceback is also in {path}")
    shown_markdown("failure").show(text, line)
    show_in_title(line)
    return line
