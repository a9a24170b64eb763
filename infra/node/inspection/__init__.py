"""All facts of this node, in one go."""

import time
from typing import Any

from infra.node.inspection.accelerators import devices
from infra.node.inspection.facts import Facts, Question
from infra.node.inspection.memory_and_disks import room
from infra.node.inspection.network_interfaces import network
from infra.node.inspection.software import build, software
from infra.node.processes import identity


def gather(question: Question) -> Facts:
    """What ``question`` asks: in some hundredths of a second, unless torch is imported to ask for accelerators."""
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
    """The same, for a request that ``Question.to_json`` made."""
    return gather(Question.from_json(request)).to_json()
