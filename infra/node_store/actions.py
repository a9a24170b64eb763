"""What `python -m infra.node` does for storage that is not shared; imported only then, as it takes its time."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

_MODULES = {
    **dict.fromkeys(("inventory", "prune", "move_aside", "listing", "send", "receive"), "on_node"),
    **dict.fromkeys(("claim", "disown"), "ownership"),
    **dict.fromkeys(("stage", "release"), "stage_on_node"),
    **dict.fromkeys(("garbage", "free"), "garbage"),
}

Request = dict[str, Any]
Action = Callable[[Request], Request | None]


def _imported_when_done(name: str) -> Action:
    def action(request: Request) -> Request | None:
        done: Action = getattr(import_module(f"infra.node_store.{_MODULES[name]}"), name)
        return done(request)

    return action


ACTIONS: dict[str, Action] = {name: _imported_when_done(name) for name in _MODULES}
"""By name."""
