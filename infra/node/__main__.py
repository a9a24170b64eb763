"""Actions that the head runs on a node, over ssh: ``python -m infra.node ACTION``.

::

    facts     report the facts about this node that preflight checks
    probe     run this node's ranks of preflight's all-reduce
    end_probe end these ranks
    prepare   create the folder of an attempt
    serve     renew the head's leases, watch an attempt and carry out the head's orders, until stdin ends
    end       end an attempt
    logs      send the files of an attempt, packed
    remove    remove the folder of an attempt
    install   make an environment from wheels

For tokenising on several hosts (infra.node.stages)::

    tokenise  run a worker of Dask for the head's scheduler, until stdin ends

For predicting on several hosts (infra.node.stages)::

    device    report which kind of device this node would predict on
    predict   predict the parts that the head gives, until stdin ends

For hosts that share no storage (infra.node.storage)::

    claim     claim this node's files of a run for one head, or renew the claim
    disown    undo a claim
    inventory list this node's checkpoints of a run
    prune     remove some of these checkpoints
    move_aside  set some of these checkpoints aside
    listing   list files of a run, with their digests
    send      send the files that the head requests
    receive   request files from the head
    stage     fetch files from the head or another node, and serve them to other nodes
    release   release what was staged for a run, so that it can be removed
    garbage   list what no run needs
    free      remove what no run needs

Each action is a function that takes a request: a message (infra.node.messages) that the head sends on stdin. User input
is therefore never part of a command line. The answer to a Query is one message on stdout; any other request starts a
conversation. If the action fails, the last line on stderr is a Failure, and the exit code is 1. To start quickly, an
action imports packages other than the standard library only if it needs them.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, get_type_hints

from infra.node.channel import BrokenOff, Channel, WrongMessage, head_channel
from infra.node.messages import Failure, Query, encode
from t5train.errors import BadMessage, StorageError, T5TrainError
from t5train.files.os_errors import explain

ACTIONS = {
    "facts": "infra.node.inspection:collect_facts",
    "probe": "infra.node.inspection.all_reduce:probe",
    "end_probe": "infra.node.inspection.all_reduce:end_probe",
    "prepare": "infra.node.attempts.attempt_actions:prepare",
    "serve": "infra.node.attempts.agent:serve",
    "end": "infra.node.attempts.attempt_actions:end",
    "logs": "infra.node.attempts.attempt_actions:logs",
    "remove": "infra.node.attempts.attempt_actions:remove",
    "install": "infra.node.environment_installer:install",
    "tokenise": "infra.node.stages.dask_worker:tokenise",
    "device": "infra.node.stages.predictor:device",
    "predict": "infra.node.stages.predictor:predict",
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
"""The module and function of each action. The function takes the request and, unless that is a Query, the channel."""


def function_of(name: str) -> Callable[..., object]:
    """Return the function of an action. Its module is imported only now, because some modules are slow to import."""
    module, _, function = ACTIONS[name].partition(":")
    found: Callable[..., object] = getattr(import_module(module), function)
    return found


def request_type(function: Callable[..., object]) -> type[Any]:
    """The class of the request that the function of an action takes."""
    kind: type[Any] = get_type_hints(function)["request"]
    return kind


def act(name: str, head: Channel) -> None:
    """Receive the request for an action and run the action; send the answer to a Query."""
    function = function_of(name)
    request = head.receive(request_type(function))
    if request is None:
        raise BrokenOff(f"the request for {name!r} did not arrive whole. Check that ~/.bashrc there reads no input")
    if isinstance(request, Query):
        head.send(function(request))
    else:
        function(request, head)


def _failure(error: T5TrainError | OSError) -> Failure:
    if isinstance(error, WrongMessage):
        return Failure(BadMessage.__name__, str(error))
    if isinstance(error, T5TrainError):
        return Failure(type(error).__name__, str(error))
    return Failure(StorageError.__name__, explain(error))


def main() -> int:
    """Run the action that the command line names, and return the exit code."""
    os.umask(0o077)
    try:
        act(sys.argv[1], head_channel())
    except (T5TrainError, OSError) as error:
        sys.stderr.write(encode(_failure(error)).decode("ascii"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
