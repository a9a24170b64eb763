"""What a run would be, without making anything."""

import json
import shlex

from flows.preflight import require_possible
from infra.launch import command
from t5train.fingerprint import fingerprint
from t5train.run_files import ATTEMPT_SPEC, ATTEMPTS
from t5train.spec import RunSpec
from t5train.train.deepspeed_config import deepspeed_config
from t5train.train.memory import Held, held_by_a_rank
from tasks.training_run import launch_spec, rank_program


def describe(spec: RunSpec) -> str:
    """The resolved spec, the fingerprints, the DeepSpeed configuration and the launch command, as text.

    Raises what ``require_possible`` raises; what this machine lacks is not asked.
    """
    of_model = require_possible(spec)
    sections = {
        "spec": _json(spec.model_dump(mode="json")),
        "fingerprints": _json(_fingerprints(spec)),
        "deepspeed config": _json(deepspeed_config(spec, of_model)),
        "memory of a rank without activations, in GB": _table(held_by_a_rank(spec, of_model)),
        "launch command": shlex.join(_launch_command(spec)),
        "run folder": str(spec.run_folder),
    }
    return "\n\n".join(f"# {title}\n{text}" for title, text in sections.items())


def _fingerprints(spec: RunSpec) -> dict[str, str]:
    """Of the run and of the settings of each part; what is made of them has the fingerprints of its inputs, too."""
    return {"run": spec.fingerprint(), **{part: fingerprint(values) for part, values in spec.identity().items()}}


def _launch_command(spec: RunSpec) -> list[str]:
    launch = launch_spec(spec, lambda folder: rank_program(folder / ATTEMPT_SPEC))
    return command(launch, spec.run_folder / ATTEMPTS / "NNNN")


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
