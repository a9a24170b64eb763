"""What the model card says of a model that was fine-tuned on pairs of source and target."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from t5train.data.samples.mixture import rates
from t5train.quantities import quantity
from t5train.records.evaluation_metrics import SYSTEMS, EvaluationMetrics, GroupMetrics
from t5train.records.metrics import of_task
from t5train.records.witness import TrainedModel, Witness
from t5train.release.card_sections import Words, cell, languages, licence
from t5train.release.markdown import code, escaped, table
from t5train.spec import PairsSpec
from t5train.spec.pairs_spec import location_of

TAGS = ("t5", "fine-tuned")
BASELINE_LABEL = "unigram baseline, all target tokens"
_SPLITS = ("train", "validation", "test")
_INTRODUCTION = """\
fine-tuned {origin} for {steps}
on pairs of source and target: {tasks}. It gives the target for a source that is written as in
training, with the prefix of its task."""
_USE = """\
{prefixes}Give the model a source with its prefix, exactly as below:

```python
inputs = tokenizer({example}, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens={target_tokens})[0], skip_special_tokens=True))
```

Sources had at most {input_tokens:,} tokens in training, and targets {target_tokens:,}. Without `max_new_tokens`,
transformers stops after 20 tokens."""
_ADAPTER = """

### The adapter alone

LoRA (Hu et al. 2021) trained adapters of rank {rank} beside {targets}, with dropout {dropout:g}; all other weights are
those of the start model. The weights in this folder are the start model's plus {alpha:g} / {rank} times the product of
each adapter's two factors. `adapter` has the factors, as PEFT loads them:

```python
from peft import PeftModel
from transformers import AutoModelForSeq2SeqLM

start = AutoModelForSeq2SeqLM.from_pretrained({start}, dtype="float32")
model = PeftModel.from_pretrained(start, "path/to/this/folder/adapter")
```

`model.merge_and_unload()` is the model in this folder within rounding, as PEFT sums products in another order."""
_MEASURED = "All target tokens count, also the one that ends a target."
_OF_TASKS = ("pairs", "exact_match", "token_accuracy", "loss")
_EVALUATION = """\
## Predictions of held-out pairs

{amounts}, chosen by a hash of their source, were predicted {how}, with at most {most_tokens:,} new tokens, in \
{dtype} on {device}. Metrics are from 0 to 100, and higher is better. In brackets are 95% intervals by bootstrap.

{scores}
{remarks}
`evaluation/metrics.json` has all metrics with their intervals, and `evaluation/predictions.jsonl` what they were \
computed from: certification computed them again. It did not predict again.

{signatures}

### Examples

{examples}"""
SHOWN_METRICS = {"exact_match": "exact match", "chrf": "chrF", "bleu": "BLEU", "rougeL": "ROUGE-L"}
"""The metrics that people are shown, and how they are called."""
_HUB_METRICS = {"rougeL": "rouge"}


def words(witness: Witness, origin: str, steps: str) -> Words:
    """Return the words of the card; ``origin`` says what training started from, and ``steps`` how long it took."""
    trained = witness.trained
    pairs, first = trained.settings["pairs"], trained.tasks[0]
    files = ", ".join(code(location_of(each)) for each in pairs["train"])
    has_prefix = any(task.prefix for task in trained.tasks)
    prefixes = table(("task", "prefix"), [(code(task.task), code(_quoted(task.prefix))) for task in trained.tasks])
    return Words(
        introduction=_INTRODUCTION.format(
            origin=origin, steps=steps, tasks=", ".join(code(task.task) for task in trained.tasks)
        ),
        use=_USE.format(
            prefixes=f"{prefixes}\n\n" if has_prefix else "",
            example=_quoted(f"{first.prefix}..."),
            input_tokens=pairs["input_tokens"],
            target_tokens=pairs["target_tokens"],
        )
        + (_adapter(trained) if trained.lora else ""),
        trained_on=f"Fine-tuned on {files}.{languages(trained)} {licence(trained)}",
        data="\n".join(["", *_data(witness), ""]),
        measured=_MEASURED,
    )


def _adapter(trained: TrainedModel) -> str:
    """Return what the adapters of a run with LoRA are, and how to load them beside the start model."""
    name, commit = trained.hub_start or (f"path/to/{trained.start_from}", None)
    start = _quoted(name) + (f", revision={_quoted(commit)}" if commit else "")
    targets = ", ".join(map(code, trained.lora["targets"]))
    return _ADAPTER.format_map(trained.lora | {"start": start, "targets": targets})


def _quoted(text: str) -> str:
    """Return a text in double quotes, so that spaces at its ends are seen."""
    return json.dumps(text, ensure_ascii=False)


def facts(trained: TrainedModel) -> dict[str, Any]:
    """Return the facts for programs: files of pairs, and the prefix of each task by its name."""
    return {
        "pairs_train": list(trained.settings["pairs"]["train"]),
        "tasks": {task.task: task.prefix for task in trained.tasks},
    }


def _data(witness: Witness) -> Iterator[str]:
    """Yield a table of the splits, the number of epochs and, of several tasks, a table of them."""
    counts, settings = witness.trained.data, witness.trained.settings
    yield table(("split", "pairs"), [(split, f"{counts[f'{split}_pairs']:,}") for split in _SPLITS])
    yield from _longer(counts)
    rows = witness.step * settings["optimizer"]["global_batch_sequences"]
    yield ""
    yield (
        f"Training took {quantity(rows, 'row')}: {rows / max(1, counts['train_samples']):,.2f} epochs over the "
        f"{quantity(counts['train_samples'], 'row')} that hold the {quantity(counts['train_pairs'], 'pair')} of the "
        "training split."
    )
    if len(witness.trained.tasks) > 1:
        yield ""
        yield table(("task", "pairs", "share of training, in pairs"), _tasks(witness.trained))


def measurements_of_tasks(witness: Witness) -> str:
    """Return a table of the held-out measurements of each of several tasks; else nothing."""
    rows = []
    for split in _SPLITS[1:]:
        for number, task in enumerate(witness.trained.task_names):
            values = {what: witness.validation.get(of_task(f"{split}_{what}", number)) for what in _OF_TASKS}
            shown = ("not measured" if value is None else cell(value, what) for what, value in values.items())
            rows.append((code(task), split, *shown))
    header = ("task", "split", *(what.replace("_", " ") for what in _OF_TASKS))
    return table(header, rows) if len(witness.trained.tasks) > 1 else ""


def evaluation_section(evaluation: EvaluationMetrics) -> str:
    """Return what the model and others predict for held-out pairs: metrics, how they are computed, and examples."""
    decoding = evaluation.predicting
    how = "greedily" if decoding.num_beams == 1 else f"with {decoding.num_beams} beams"
    if decoding.length_penalty != 1:
        how += f" and a length penalty of {decoding.length_penalty:g}"
    columns = [name for name in SHOWN_METRICS if name in evaluation.signatures]
    scores = [row for group in evaluation.groups for row in _score_rows(group, columns)]
    examples = [[*map(_code, (each.source, each.reference, each.hypothesis))] for each in evaluation.examples]
    return _EVALUATION.format(
        amounts=_amounts(evaluation),
        how=how,
        most_tokens=decoding.most_tokens,
        dtype=decoding.dtype,
        device=escaped(decoding.device),
        scores=table(("split", "task", "what is measured", *(SHOWN_METRICS[name] for name in columns)), scores),
        remarks="".join(f"\n- {each}" for each in _remarks(evaluation)) + "\n",
        signatures=table(
            ("metric", "signature"), [(code(name), code(each)) for name, each in evaluation.signatures.items()]
        ),
        examples=table(("source", "reference", "prediction"), examples),
    )


def _code(text: str) -> str:
    return code(text) if text else "(nothing)"


def _amounts(evaluation: EvaluationMetrics) -> str:
    groups = [group for group in evaluation.groups if group.task is not None]
    predicted = {split: sum(group.pairs for group in groups if group.split == split) for split in _SPLITS[1:]}
    return " and ".join(
        f"{predicted[split]:,} of the {quantity(evaluation.held_out[split], 'pair')} of the {split} split"
        for split in predicted
        if split in evaluation.held_out
    )


def _score_rows(group: GroupMetrics, columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    task = "all" if group.task is None else code(group.task)
    for system, what in SYSTEMS.items():
        if (metrics := group.systems.get(system)) is not None:
            yield group.split, task, what, *(metrics[name].with_interval for name in columns)


def _remarks(evaluation: EvaluationMetrics) -> Iterator[str]:
    """Yield what limits the metrics."""
    if "bleu" not in evaluation.signatures:
        yield "Only exact match was measured: the others need the packages of t5-pretrain[score]."
    for group in evaluation.groups:
        if group.task is not None:
            where = f"of {quantity(group.pairs, 'prediction')} for {code(group.task)} in the {group.split} split"
            if group.not_ended:
                yield f"{group.not_ended:,} {where} were cut off at the most tokens that were allowed."
            if group.unknown:
                yield f"{group.unknown:,} {where} cannot be exact: their references have an unknown piece."


def model_index(name: str, evaluation: EvaluationMetrics) -> list[dict[str, Any]]:
    """Return the metrics of the model for each task and split, in the format of the Hub."""
    results = [
        {
            "task": {"type": "text2text-generation"},
            "dataset": {"type": group.task, "name": f"{group.task}, {group.split} split", "split": group.split},
            "metrics": [
                {"type": _HUB_METRICS.get(metric, metric), "name": label, "value": group.systems["model"][metric].value}
                for metric, label in SHOWN_METRICS.items()
                if metric in group.systems["model"]
            ],
        }
        for group in evaluation.groups
        if group.task is not None
    ]
    return [{"name": name, "results": results}]


def _longer(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for each split with pairs that are longer than a row: what is measured on them is not whole."""
    done = {"cut": "shortened", "dropped": "left out"}
    for split, (what, said) in itertools.product(_SPLITS, done.items()):
        if count := counts.get(f"{split}_{what}"):
            yield ""
            pairs = quantity(count, "pair")
            lost = counts.get(f"{split}_cut_targets") if what == "cut" and split != "train" else 0
            never = f" Of these, {lost:,} had a longer target, and count as no exact match." if lost else ""
            yield f"{pairs} of the {split} split had a side that is longer than a row, and were {said}.{never}"


def _tasks(trained: TrainedModel) -> Iterator[tuple[str, str, str]]:
    sizes = [trained.data[of_task("train_pairs", number)] for number in range(len(trained.tasks))]
    shares = rates(sizes, PairsSpec.model_validate(trained.settings["pairs"]))
    for task, size, share in zip(trained.tasks, sizes, shares, strict=True):
        yield code(task.task), f"{size:,}", f"{float(share):.2%}"
