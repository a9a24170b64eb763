"""What a dry run says of a run on pairs."""

from pathlib import Path

from infra.head.hosts.hostfile import chosen_hosts
from infra.head.predicting.hosts_predictor import evaluating_machines
from infra.head.preflight.text_checks import TextFacts
from infra.node.node_folders import PAIR_SHARDS
from t5train.checkpoint.resume import begun_shards
from t5train.errors import RecordError, UnknownVersion, Unreadable
from t5train.files.presence import visible_in
from t5train.inference.evaluation.held_out_metrics import can_score
from t5train.model.model_shape import T5Shape
from t5train.model.parameters import count_trained
from t5train.quantities import format_bytes, quantity
from t5train.records.locations import redacted
from t5train.records.stage_records import PairShards
from t5train.records.start_copy import origin
from t5train.spec import RunSpec
from t5train.spec.pairs_spec import PairSource


def pairs_rows(spec: RunSpec, files: TextFacts | None) -> dict[str, str]:
    """Return which pairs a run trains on, and how they are split, as rows of the plan."""
    pairs, tasks = spec.pairs, spec.pairs.tasks()
    amount = ""
    if files is not None and files.sources:
        amount = f"; {quantity(files.num_files, 'file')}, {format_bytes(files.size_bytes)}"
    return {
        "pairs": f"{quantity(len(tasks), 'task')}: {', '.join(map(_task_said, tasks))}{amount}",
        "splits": ", ".join(
            f"{name} {', '.join(map(redacted, given)) if given else f'{share / 10:g}% of the sources'}"
            for name, given, share in zip(
                ("train", "validation", "test"), ((), pairs.validation, pairs.test), pairs.shares(), strict=True
            )
        ),
        **({"evaluation": _evaluation_said(spec)} if spec.predicts_held_out else {}),
    }


def _evaluation_said(spec: RunSpec) -> str:
    evaluate = spec.evaluate
    how = "greedily" if evaluate.num_beams == 1 else f"with {evaluate.num_beams} beams"
    lacking = "" if can_score() else ", measured by exact match only, as t5-pretrain[score] is not installed"
    by_start = ", also by the start model" if spec.model.start_from is not None else ""
    amount = f"at most {quantity(evaluate.max_pairs, 'pair')} of each held-out split"
    return f"{amount} are predicted {how} after the export{by_start}{_on_hosts(spec)}{lacking}"


def _on_hosts(spec: RunSpec) -> str:
    """Return where pairs are predicted, if not here. Raises SpecError if that hostfile is not valid."""
    if (machines := evaluating_machines(spec)) is None:
        return ""
    names = chosen_hosts(machines.cluster).names
    return f", on {quantity(len(names), 'host')} of {machines.cluster.hostfile}"


def result_said(spec: RunSpec) -> str:
    """Return which checkpoint is the result, and what is predicted to choose it."""
    evaluate = spec.evaluate
    how_often = f"every {quantity(spec.storage.validate_every_steps, 'step')}"
    pairs = quantity(evaluate.best_pairs, "pair")
    predicted = f": at most {pairs} are predicted {how_often}" if evaluate.generates else ""
    return f"the checkpoint with the best {evaluate.best_metric}{predicted}"


def _task_said(task: PairSource) -> str:
    location = "" if task.location == task.task else f" from {redacted(task.location)}"
    return f"{task.task}{location}{f' (prefix {task.prefix!r})' if task.prefix else ''}"


def packed_said(spec: RunSpec) -> str:
    """Return how pairs become rows."""
    too_long = {"cut": "longer ones are cut", "drop": "longer ones are dropped", "refuse": "longer ones are refused"}
    packing = "each packed with pairs of one task" if spec.pairs.pack else "each with one pair"
    return f"{packing}; {too_long[spec.pairs.too_long]}"


def start_said(spec: RunSpec, shape: T5Shape) -> str:
    """Return where the weights of a run on pairs begin, and what is trained of them; empty for a run on text."""
    if not spec.is_fine_tuning:
        return ""
    if (start := spec.model.start_from) is None:
        return ", drawn at random, as model.start_from is not set"
    lora = spec.finetune.lora
    trained = f" and frozen; {count_trained(shape, lora):,} more, of adapters, are trained" if lora.rank else ""
    return f", from {origin(Path(start)) or redacted(start)}{trained}"


def epochs_of_pairs(spec: RunSpec) -> tuple[float | None, str]:
    """Return how often a run uses each row of pairs, and what that holds for. Known once the run has begun."""
    wanted = begun_shards(spec.run_folder)
    for folder in visible_in(spec.storage.root / PAIR_SHARDS):
        if wanted is not None and folder.name.endswith(f"-{wanted[:12]}"):
            try:
                rows = int(PairShards.load(folder).counts["train_rows"])
            except (RecordError, UnknownVersion, Unreadable):
                break  # unfinished or damaged, so that the run makes them again, or not readable now
            number = spec.optimizer.num_steps * spec.optimizer.global_batch_sequences / max(1, rows)
            return number, f"{number:,.2f} over the {quantity(rows, 'row')} of the train split in {folder}"
    return None, (
        "not known yet: they follow from how many pairs a row holds, which is known once they are packed. "
        "`t5-pretrain data pairs` estimates the rows of an epoch"
    )
