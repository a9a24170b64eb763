"""Actions that the head runs on a machine of the run, over ssh: ``python -m infra.node ACTION``.

::

    facts     report the facts about this machine that preflight checks
    probe     run this machine's ranks of the test all-reduce; end_probe ends them
    prepare   create the folder of an attempt
    watch     report what its ranks do and carry out the head's orders for them, until stdin ends
    end       end an attempt
    logs      send its files, packed
    remove    remove its folder

and, for hosts that share no storage (infra.node.storage)::

    claim     claim this node's files of a run for one head, or renew the claim
    disown    undo a claim
    inventory list this node's checkpoints of a run
    prune     remove some of them
    move_aside  move some of them to where nothing uses or removes them
    listing   list other files of a run
    send      send the files that the head requests
    receive   request files from the head
    stage     fetch files from the head or another node, and serve them to other nodes
    release   release what was staged for a run, so that it can be removed
    garbage   list what no run needs
    free      remove what no run needs

Each action is a function of a request, a message (infra.node.messages) that is sent on stdin, so user input is never
part of a command line. A Query is answered by one message on stdout; any other request starts a conversation. If the
action fails, the last line on stderr is a Failure, and the exit code is 1. To start quickly, an action imports more
than the standard library only if it needs it.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, get_type_hints

from infra.node.channel import Channel, WrongMessage, head_channel
from infra.node.messages import Failure, Query, encode
from t5train.errors import BadMessage, StorageError, T5TrainError
from t5train.files.os_errors import explain

ACTIONS = {
    "facts": "infra.node.inspection:gather",
    "probe": "infra.node.inspection.all_reduce:probe",
    "end_probe": "infra.node.inspection.all_reduce:end_probe",
    "prepare": "infra.node.attempts.attempt_actions:prepare",
    "watch": "infra.node.attempts.session_server:watch",
    "end": "infra.node.attempts.attempt_actions:end",
    "logs": "infra.node.attempts.attempt_actions:logs",
    "remove": "infra.node.attempts.attempt_actions:remove",
    "claim": "infra.node.attempts.run_ownership:claim",
    "disown": "infra.node.attempts.run_ownership:disown",
    "inventory": "infra.node.storage.stored_checkpoints:inventory",
    "prune": "infra.node.storage.stored_checkpoints:prune",
    "move_aside": "infra.node.storage.stored_checkpoints:move_aside",
    "listing": "infra.node.storage.stored_checkpoints:listing",
    "send": "infra.node.storage.stored_checkpoints:send",
    "receive": "infra.node.storage.stored_checkpoints:receive",
    "stage": "infra.node.storage.chain_copy:stage",
    "release": "infra.node.storage.chain_copy:release",
    "garbage": "infra.node.storage.garbage:garbage",
    "free": "infra.node.storage.garbage:free",
}
"""The function of each action. It takes the request, and the channel to the head if it is not a Query."""


def function_of(name: str) -> Callable[..., object]:
    """The function of an action. Its module is imported only now, because some are slow to import."""
    module, _, function = ACTIONS[name].partition(":")
    found: Callable[..., object] = getattr(import_module(module), function)
    return found


def request_type(function: Callable[..., object]) -> type[Any]:
    """The class of the requests of an action."""
    kind: type[Any] = get_type_hints(function)["request"]
    return kind


def act(name: str, head: Channel) -> None:
    """Receive the request for an action, run it, and send the answer."""
    function = function_of(name)
    request = head.receive(request_type(function))
    if isinstance(request, Query):
        head.send(function(request))
    elif request is not None:
        function(request, head)


def _failure(error: T5TrainError | OSError) -> Failure:
    if isinstance(error, WrongMessage):
        return Failure(BadMessage.__name__, str(error))
    if isinstance(error, T5TrainError):
        return Failure(type(error).__name__, str(error))
    return Failure(StorageError.__name__, explain(error))


def main() -> int:
    """Run one action."""
    os.umask(0o077)
    try:
        act(sys.argv[1], head_channel())
    except (T5TrainError, OSError) as error:
        sys.stderr.write(encode(_failure(error)).decode("ascii"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
