"""Describes a run without running anything."""

import json
import shlex
import sys
from typing import Any

from infra.head.hosts.hostfile import read_hosts
from infra.head.launch.deepspeed_launcher import launch_command
from infra.head.launch.local_launch import command
from infra.head.preflight.run_checks import require_possible
from infra.head.training_run import launch_spec, rank_program
from infra.node.attempts import process_guard
from infra.node.node_folders import node_path
from t5train.engine.deepspeed_config import deepspeed_config
from t5train.engine.memory_estimate import Held, held_by_a_rank
from t5train.files.run_folder import ATTEMPT_SPEC, ATTEMPTS
from t5train.records.identity import fingerprint
from t5train.spec import RunSpec


def describe(spec: RunSpec) -> str:
    """Return the spec, fingerprints, DeepSpeed configuration, memory, hosts and launch command of a run, as text.

    Raises the errors of ``require_possible``. Does not check whether this machine can execute the run.
    """
    of_model = require_possible(spec)
    sections = {
        "spec": _json(spec.model_dump(mode="json")),
        "fingerprints": _json(_fingerprints(spec)),
        "deepspeed config": _json(deepspeed_config(spec, of_model)),
        "memory of a rank without activations, in GB": _table(held_by_a_rank(spec, of_model)),
        **_hosts(spec),
        "launch command": shlex.join(_launch_command(spec)),
        "run folder": str(spec.run_folder),
    }
    return "\n\n".join(f"# {title}\n{text}" for title, text in sections.items())


def plan(spec: RunSpec) -> dict[str, Any]:
    """Return the same as ``describe`` as JSON values; docs/json.md describes them."""
    of_model = require_possible(spec)
    hosts = () if spec.cluster.hostfile is None else read_hosts(spec.cluster).all
    return {
        "recipe": spec.recipe,
        "name": spec.run_name,
        "run_folder": str(spec.run_folder),
        "spec": spec.model_dump(mode="json"),
        "fingerprints": _fingerprints(spec),
        "deepspeed_config": deepspeed_config(spec, of_model),
        "memory_of_a_rank": [
            {"what": each.what, "accelerator_bytes": each.accelerator, "host_bytes": each.host}
            for each in held_by_a_rank(spec, of_model)
        ],
        "hosts": [{"name": host.name, "slots": list(host.slots)} for host in hosts],
        "launch_command": _launch_command(spec),
    }


def _fingerprints(spec: RunSpec) -> dict[str, str]:
    """Return the fingerprints of the run and of each part's settings. Those of results also include their inputs."""
    return {"run": spec.fingerprint(), **{part: fingerprint(values) for part, values in spec.identity().items()}}


def _hosts(spec: RunSpec) -> dict[str, str]:
    """Return a table with the ranks of each host; empty without a hostfile."""
    if spec.cluster.hostfile is None:
        return {}
    rows, first = [f"{'ranks':14}{'host':28}slots"], 0
    for host in read_hosts(spec.cluster).all:
        last = first + len(host.slots) - 1
        rows.append(f"{f'{first} to {last}':14}{host.name:28}{', '.join(map(str, host.slots))}")
        first = last + 1
    return {"hosts": "\n".join(rows)}


def _launch_command(spec: RunSpec) -> list[str]:
    if spec.cluster.hostfile is None:
        launch = launch_spec(spec, lambda folder: rank_program(folder / ATTEMPT_SPEC))
        return command(launch, spec.run_folder / ATTEMPTS / "NNNN")
    hosts, run_id = read_hosts(spec.cluster), f"{spec.run_name}-NNNN-ID"
    on_nodes = node_path("attempts", run_id)
    program = (
        process_guard.MODULE,
        str(on_nodes),
        sys.executable,
        *rank_program(on_nodes / ATTEMPT_SPEC),
    )
    address = spec.cluster.master_address or f"ADDRESS_OF_{hosts.names[0]}"
    rendezvous = (address, spec.cluster.master_port or "FREE_PORT")
    return launch_command(spec.cluster, hosts, node_path("heads", run_id), master=rendezvous, program=program)


def _table(held: list[Held]) -> str:
    rows = [
        ("", "accelerator", "host"),
        *((one.what, _gigabytes(one.accelerator), _gigabytes(one.host)) for one in held),
    ]
    return "\n".join(f"{what:28}{accelerator:>12}{host:>8}" for what, accelerator, host in rows)


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f}" if size_bytes else "."


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False)
