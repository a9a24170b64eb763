"""How a guard reports that its disk failed: in the launcher's log, because it cannot write an exit record.

Standard library only, as the guards import it.
"""

import re
from pathlib import Path

from t5train.errors import StorageError, T5TrainError, error_of
from t5train.files.error_report import reportable

_LINE = re.compile(r"the guard of (\S+) failed: (\w+): (.*)")


def line(name: str, error: OSError | StorageError) -> str:
    """The line that the guard of the process called ``name`` writes to stderr."""
    reported = reportable(error)
    return f"the guard of {name} failed: {type(reported).__name__}: {reported}\n"


def read(launcher_log: Path) -> dict[str, T5TrainError]:
    """The errors that guards reported in the launcher's log, by the name of their process."""
    try:
        lines = launcher_log.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return {}  # the launcher never started, or its disk failed as well
    found = (match for each in lines if (match := _LINE.search(each)))
    return {match[1]: error_of(match[2], match[3]) for match in found}
