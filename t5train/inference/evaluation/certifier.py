"""The program that certifies an export in a new process.

For its arguments, what it writes and how it ends, see ``t5train.release.certification``. It is here because it also
computes the metrics of predictions again.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from t5train.errors import T5TrainError
from t5train.files.os_errors import in_one_line
from t5train.inference.evaluation.metrics_comparison import compare_metrics
from t5train.release.certification import LOG, certify


def main(arguments: list[str]) -> int:
    """Certify in this new process, and report on the original standard output. Returns the exit code."""
    try:
        return _certify_and_report(arguments, _reporter())
    except BrokenPipeError:  # the parent, which alone reads the reports, has ended
        return 1


def _certify_and_report(arguments: list[str], report: Callable[..., None]) -> int:
    export_folder, witness, start_from = Path(arguments[0]), Path(arguments[1]), next(iter(arguments[2:]), None)
    try:
        certify(
            *(export_folder, witness, lambda what, done, total: report(what=what, done=done, total=total), start_from),
            compare_metrics,
        )
    except T5TrainError as error:
        report(error=str(error))
        return 1
    except BrokenPipeError:
        raise
    except Exception as error:  # libraries' errors often do not name the file
        traceback.print_exc()
        report(
            error=f"{export_folder} could not be compared with {witness} ({in_one_line(error)}). "
            f"For details, see {export_folder.absolute().parent / LOG}"
        )
        return 1
    return 0


def _reporter() -> Callable[..., None]:
    """Return a function that writes JSON lines to standard output. All other output goes to standard error."""
    channel = os.dup(1)  # written without a buffer, so that nothing is left to flush at the exit
    os.dup2(2, 1)

    def report(**fact: Any) -> None:
        rest = memoryview(json.dumps(fact).encode() + b"\n")
        while rest:  # a signal can cut a write short
            rest = rest[os.write(channel, rest) :]

    return report


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
