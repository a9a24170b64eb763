"""What `python -m infra.node` does for a preflight; the rest is imported only then, as it takes its time."""

from typing import Any


def facts(request: dict[str, Any]) -> dict[str, Any]:
    """All facts of this node, as a ``Question`` asks for them."""
    from infra.preflight.facts import Question
    from infra.preflight.gather import gather

    return gather(Question.from_json(request)).to_json()


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """This node's ranks of the all-reduce."""
    from infra.preflight.probe import probe as run_ranks

    return run_ranks(request)


def end_probe(request: dict[str, Any]) -> dict[str, Any]:
    """End them."""
    from infra.preflight.probe import end_probe as end_ranks

    return end_ranks(request)
