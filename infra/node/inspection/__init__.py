"""Collects the facts of this node for preflight: software, accelerators, network, memory, disks, and an all-reduce.

Not here: judging them (``infra.head.preflight``).
"""

import time

from infra.node.inspection.facts import Facts, Question
from infra.node.processes import identity


def collect_facts(request: Question) -> Facts:
    """Collect the facts: takes some hundredths of a second, unless torch must be imported to query accelerators."""
    # Imported here: at module level, these names would hide the modules of the same name.
    from infra.node.inspection.hardware import devices, resources
    from infra.node.inspection.network_interfaces import network
    from infra.node.inspection.software import build, software

    started_at = time.time()
    answers = (
        identity(),
        network(request),
        software(request.spec),
        devices(request),
        build(request.environment),
        resources(request),
    )
    return Facts(started_at, time.time(), *answers)
