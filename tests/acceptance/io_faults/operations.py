"""Every operation of the campaign, by name."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.acceptance.io_faults.small_run import SmallRun
    from tests.acceptance.io_faults.trial import Operation

NAMES = (
    "select", "save", "prune", "recover", "gather", "gc", "consolidate", "export", "certify", "export again", "publish",
)  # fmt: skip


def operation(name: str, small_run: "SmallRun") -> "Operation":
    """Make an operation of ``NAMES`` on the small run. Imports what all operations need."""
    from tests.acceptance.io_faults.host_operations import Gather, Gc, Recover
    from tests.acceptance.io_faults.release_operations import OPERATIONS, Release
    from tests.acceptance.io_faults.run_operations import Prune, Save, Select

    if name in OPERATIONS:
        return Release(name, small_run)
    return next(each for each in (Select, Save, Prune, Recover, Gather, Gc) if each.name == name)(small_run)
