"""Lines of ranks in the head's log, while they run, at a bounded rate."""

import logging
from collections.abc import Iterable

from infra.attempts.log_lines import printable
from infra.environment import redact
from infra.node.log_tail import warns
from infra.node.rate_limit import RateLimit

LINES_A_SECOND = 20.0
BURST_LINES = 200.0
_log = logging.getLogger(__name__)


class RankLines:
    """Passes on what the machines of a run send, each of which bounds its own lines already."""

    def __init__(self) -> None:
        self._limit = RateLimit(LINES_A_SECOND, BURST_LINES)
        self._left_out = 0

    def tell(self, host: str, lines: Iterable[tuple[str, str]], left_out: int) -> None:
        """Log lines, each with its rank's name; how many were left out is told with the next."""
        for name, line in lines:
            if not self._limit.take(1):
                self._left_out += 1
                continue
            omitted = f" ({self._left_out} lines before this one are left out)" if self._left_out else ""
            self._left_out = 0
            level = logging.WARNING if warns(line) else logging.INFO
            _log.log(level, "%s %s: %s%s", host, printable(name), printable(redact(line)), omitted)
        self._left_out += left_out  # its machine has left out what came after these lines
