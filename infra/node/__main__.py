"""What the head has done on a machine of the run: ``python -m infra.node ACTION``, run there over ssh.

::

    facts     what a preflight wants to know of this machine
    probe     run its ranks of an all-reduce; and end them, end_probe
    prepare   make the folder of an attempt
    watch     tell of its ranks, and take the head's word for them, until stdin ends
    end       end an attempt
    logs      its files, packed
    remove    remove its folder

and, where hosts share no storage (infra.node_store)::

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
from collections.abc import Callable
from typing import Any

from infra.node.attempt import logs, prepare, remove
from infra.node.end import end
from infra.node.watch import watch
from infra.node_store import actions as node_store
from infra.preflight.actions import end_probe, facts, probe
from t5train.errors import StorageError, T5TrainError
from t5train.os_errors import explain

Request = dict[str, Any]
Action = Callable[[Request], Request | None]
"""Given what the head asks for, the answer; None from those that write to stdout themselves."""

ACTIONS: dict[str, Action] = {
    "facts": facts,
    "probe": probe,
    "end_probe": end_probe,
    "prepare": prepare,
    "watch": watch,
    "end": end,
    "logs": logs,
    "remove": remove,
    **node_store.ACTIONS,
}


def main() -> int:
    """Do one action."""
    os.umask(0o077)
    # Unbuffered: what follows the first line is read by `watch`, from the descriptor itself.
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        request = json.loads(stdin.readline())
    try:
        answer = ACTIONS[sys.argv[1]](request)
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
