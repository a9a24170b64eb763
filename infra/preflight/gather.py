"""All facts of this node, in one go."""

import time
from typing import Any

from infra.preflight.build import build
from infra.preflight.devices import devices
from infra.preflight.facts import Facts, Question
from infra.preflight.machine import identity
from infra.preflight.network import network
from infra.preflight.room import room
from infra.preflight.software import software


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
