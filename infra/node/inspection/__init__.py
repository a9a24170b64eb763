"""Collects the facts of this node for preflight: software, accelerators, network, memory, disks, and an all-reduce.

Not here: judging them (``infra.head.preflight``).
"""

import time
from typing import Any

from infra.node.inspection.facts import Facts, Question
from infra.node.processes import identity


def gather(question: Question) -> Facts:
    """Answer ``question``: takes some hundredths of a second, unless torch is imported to query accelerators."""
    # Imported here: at module level, these names would hide the modules of the same name.
    from infra.node.inspection.accelerators import devices
    from infra.node.inspection.memory_and_disks import room
    from infra.node.inspection.network_interfaces import network
    from infra.node.inspection.software import build, software

    started_at = time.time()
    answers = (
        identity(),
        network(question),
        software(question.spec),
        devices(question),
        build(question.environment),
        room(question),
    )
    return Facts(started_at, time.time(), *answers)


def facts(request: dict[str, Any]) -> dict[str, Any]:
    """The same, for a question as JSON (see ``Question.from_json``)."""
    return gather(Question.from_json(request)).to_json()
