"""The time that a command may take, where machines are lent for minutes: what does not fit is left to the next one."""

import math
import signal
import time
from types import FrameType
from typing import NoReturn

from t5train.progress import Progress

NOT_FINISHED = 3
"""Exit code of a command that stopped before its deadline, and continues when it is run again."""
SAVING_SECONDS = 20.0
"""Left when a training that does not end in time is told to save."""
_ENDING_SECONDS = 10.0


class OutOfTime(Exception):
    """The next measurement is not expected to end in time, or one did not."""


class Ending(BaseException):
    """Time is running out. As this is no failure, ranks get time to save."""


class TimeBudget:
    """Seconds from now on. ``OutOfTime`` is raised wherever this process is, shortly before they are over."""

    def __init__(self, seconds: float | None) -> None:
        """``seconds``: None for no limit; zero to start nothing."""
        self._deadline = math.inf if seconds is None else time.monotonic() + seconds - _ENDING_SECONDS
        if seconds is not None and self.left > 0:
            signal.signal(signal.SIGALRM, _raise)
            signal.setitimer(signal.ITIMER_REAL, self.left)

    @property
    def left(self) -> float:
        """The seconds that measurements may still take."""
        return self._deadline - time.monotonic()

    def require(self, what: str, seconds: float) -> None:
        """Raise OutOfTime if what takes so long would not end in time."""
        if seconds > self.left:
            left = max(0.0, self.left)
            raise OutOfTime(f"{what} is expected to take {seconds:.0f} s, but {left:.0f} s are left")

    def until_saving(self, progress: Progress) -> Progress:
        """Return what shows the progress of training, and raises Ending while there is time to save.

        Ranks that do not save by the deadline are ended as all else is, by OutOfTime.
        """

        def report(what: str, done: int, total: int | None) -> None:
            if self.left < SAVING_SECONDS:
                raise Ending
            progress(what, done, total)

        return report

    def close(self) -> None:
        """Raise nothing from now on."""
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise(_number: int, _frame: FrameType | None) -> NoReturn:
    raise OutOfTime("the measurement in progress did not end in time")
