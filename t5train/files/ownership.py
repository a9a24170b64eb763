"""Ownership of a run in one place: its folder or its bucket.

Places differ in what a head writes there, and in when another head may take over. What they share is here: a thread
that renews, the decision that the run is lost, and an end that does not wait for a place that hangs. Standard library
only, as guards import it.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy

from t5train.errors import RunLocked
from t5train.files.os_errors import in_one_line

_END_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Ownership(ABC):
    """A run that this process has taken in one place, renewed until it is released or lost. Threads can share it.

    Each place has its own thread, so one that hangs delays the renewal of no other.
    """

    def __init__(self, what: str, interval_seconds: float) -> None:
        """Renew from now on, so a subclass calls this last. ``what`` describes the ownership in the log."""
        self._what, self._interval_seconds = what, interval_seconds
        self._lost: RunLocked | None = None
        self._writing, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name=what, daemon=True)
        self._thread.start()

    def require_kept(self) -> None:
        """Raise RunLocked if another head is known to have taken over the run. Asks nobody."""
        if self._lost is not None:
            raise copy(self._lost)  # each caller gets its own traceback

    def renew(self) -> None:
        """Renew now. Raises RunLocked if another head has taken over the run, and the errors of the place."""
        self._while_kept(self._renew)

    def release(self) -> None:
        """Stop renewing, and release the run, so that another head need not wait. Does nothing the second time.

        Waits only a few seconds, if the place hangs.
        """
        self._ended.set()
        self._thread.join(_END_SECONDS)

    @abstractmethod
    def _renew(self) -> None:
        """Write to the place that this process is alive. Raises RunLocked if the run is another head's there."""

    @abstractmethod
    def _release(self) -> None:
        """Write to the place that the run is free. Raises RunLocked if the run is another head's there."""

    def _while_kept(self, write: Callable[[], None]) -> None:
        """Write to the place, one thread at a time. Once another head is found there, the run is lost for good."""
        with self._writing:
            self.require_kept()
            try:
                write()
            except RunLocked as error:
                self._lost = error
                raise

    def _keep(self) -> None:
        was_renewed = True
        while not self._ended.wait(self._interval_seconds):
            try:
                self.renew()
            except RunLocked as error:
                _log.error("%s", error)
                return
            except Exception as error:  # whatever it is, the run has to be kept
                if was_renewed:
                    _log.warning("%s cannot be renewed, will retry: %s", self._what, in_one_line(error))
                was_renewed = False
            else:
                was_renewed = True
        try:
            self._while_kept(self._release)
        except RunLocked:
            return  # it is the other head's now
        except Exception as error:
            _log.warning("%s is not released, and expires by itself: %s", self._what, in_one_line(error))
