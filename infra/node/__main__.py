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

An action reads its request from stdin as one line of JSON and writes its answer to stdout as lines of JSON, so user
input is never part of a command line. An error of this project is written to stderr, and the exit code is 1. To start
quickly, an action imports more than the standard library only if it needs it.
"""

import json
import os
import sys
from importlib import import_module
from typing import Any

from t5train.errors import StorageError, T5TrainError
from t5train.files.os_errors import explain

ACTIONS = {
    "facts": "infra.node.inspection:facts",
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
"""The function of each action. It takes the request and returns the answer, or None if it wrote to stdout itself."""


def act(name: str, request: dict[str, Any]) -> dict[str, Any] | None:
    """Run an action. Its module is imported only now, because some are slow to import."""
    module, _, function = ACTIONS[name].partition(":")
    answer: dict[str, Any] | None = getattr(import_module(module), function)(request)
    return answer


def main() -> int:
    """Run one action."""
    os.umask(0o077)
    # Unbuffered, because `watch` reads what follows the first line from the descriptor itself.
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        request = json.loads(stdin.readline())
    try:
        answer = act(sys.argv[1], request)
    except T5TrainError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"{StorageError.__name__}: {explain(error)}\n")
        return 1
    if answer is not None:
        sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
