"""What the head has done on a machine of the run: ``python -m infra.node ACTION``, run there over ssh.

::

    facts     what a preflight wants to know of this machine
    probe     run its ranks of an all-reduce; and end them, end_probe
    prepare   make the folder of an attempt
    watch     tell of its ranks, and take the head's word for them, until stdin ends
    end       end an attempt
    logs      its files, packed
    remove    remove its folder

and, where hosts share no storage (infra.node.storage)::

    claim     take or renew what it holds of a run for one head
    disown    undo that
    inventory what it holds of a run's checkpoints
    prune     remove some
    move_aside  move some where nothing uses or removes them
    listing   other files of a run
    send      send files that the head asks for
    receive   ask the head for files
    stage     ask the head, or another node, and let others ask
    release   what was staged for a run may go
    garbage   what no run needs
    free      remove that

What an action is told is one line of JSON on stdin, what it answers are lines of JSON on stdout; so nothing of a user's
is ever part of a command line. An error of ours is told on stderr, exit code 1. Quick to start: what
imports more than the standard library does so when it is asked for.
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
"""Where each action is done. Given what the head asks for, it answers; None where it has written to stdout itself."""


def act(name: str, request: dict[str, Any]) -> dict[str, Any] | None:
    """Do an action, whose module is imported only now: some take their time."""
    module, _, function = ACTIONS[name].partition(":")
    answer: dict[str, Any] | None = getattr(import_module(module), function)(request)
    return answer


def main() -> int:
    """Do one action."""
    os.umask(0o077)
    # Unbuffered: what follows the first line is read by `watch`, from the descriptor itself.
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
