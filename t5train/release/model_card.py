"""README.md of an export and its picture: what the model is, and everything that it was made from.

The front matter is for programs. It has fields of the Hugging Face Hub and, under ``t5_pretrain``, the facts that the
rest of the card states in words. The text depends only on the witness, the lineage, the digests of the other files and
the versions that made it, so that certification can compare it. So does the loss curve, a PNG.
"""

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from t5train.files.atomic import replacing
from t5train.quantities import quantity
from t5train.records.digests import FileDigest
from t5train.records.evaluation_metrics import EvaluationMetrics
from t5train.records.identity import Provenance
from t5train.records.metrics import beside_baseline
from t5train.records.witness import Witness
from t5train.release import pair_card
from t5train.release.card_sections import (
    Words,
    data,
    hub_licence,
    languages,
    licence,
    measured_at,
    measurements,
    table,
    ties,
    training,
    warning,
)
from t5train.release.markdown import code

README, LOSS_CURVE = "README.md", "loss_curve.png"
CARD_FILES = frozenset({README, LOSS_CURVE})
"""The card and its picture, which the version and commit that export a model determine. transformers reads neither."""
FACTS = "t5_pretrain"
_SETTINGS = "\n## Settings\n\n```json\n"
_HUB = {
    "library_name": "transformers",
    "pipeline_tag": "text2text-generation",
    "tags": ["t5", "span-corruption"],
}
_CARD = """\
---
{front_matter}
---

# {name}

A {family} of {num_parameters:,} parameters in fp32, {introduction}
{warning}
## Use

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```
{ties}
{use}

## Verify

`certificate.json` records how a new process compared this folder with what the training engine recorded of its own
fp32 weights. Its `tolerance_reason` says how closely logits had to agree: in all bits, or within rounding if the
processor or the libraries were other ones than those that trained. `manifest.json` has the size and sha256 of every
file, and `t5-pretrain verify FOLDER_OR_URL` checks them.

## Data and licence

{trained_on}
{data}
## Training

{training}
{curve}
## Held-out measurements {measured_at}

Losses are in nats per token, and lower is better. Each target token is predicted from the input and the target tokens
before it. {measured}

{measurements}
{evaluation}
## Lineage

Recipe `{recipe}`. Each fingerprint is a sha256 over the settings and the inputs of its stage.

{lineage}

## Settings

```json
{settings}
```

## Made with

{versions}
"""
_INTRODUCTION = """\
pre-trained {origin} by span corruption
(Raffel et al. 2020) for {steps}. It fills in spans of text marked by `<extra_id_0>`,
`<extra_id_1>`, ...; it has not been fine-tuned for anything else."""
_USE = """\
Fill in the gaps of a text:

```python
inputs = tokenizer("The <extra_id_0> of a list is <extra_id_1>.", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))
```

The same from a command line, with the spans put into the text:

```
t5-pretrain generate path/to/this/folder "The <extra_id_0> of a list is <extra_id_1>."
t5-pretrain evaluate path/to/this/folder --corpus your-text.txt
```

Fine-tune it on pairs of texts, here in one batch:

```python
import torch

sources, targets = ["question: one plus one", "question: two plus two"], ["two", "four"]
batch = tokenizer(sources, text_target=targets, padding=True, truncation=True, return_tensors="pt")
batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100  # padding does not count in the loss
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
model.train()
for step in range(10):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained("fine-tuned")
tokenizer.save_pretrained("fine-tuned")
```"""
_MEASURED = "Masked tokens are all target tokens except sentinels and the end of the text."
_CURVES = {
    "loss": "training, all target tokens",
    "validation_loss": "validation, all target tokens",
    "validation_content_loss": "validation, masked tokens",
}
_BASELINE_LABEL = "unigram baseline, masked tokens"
_WIDTH_INCHES, _HEIGHT_INCHES, _DOTS_PER_INCH = 8.0, 4.0, 100
_FEW_POINTS = 60


def model_card(
    witness: Witness,
    lineage: Mapping[str, str],
    files: Mapping[str, FileDigest],
    provenance: Provenance,
    evaluation: EvaluationMetrics | None = None,
) -> str:
    """Return the card as Markdown. ``files`` are those of the export, without the card and the certificate.

    ``evaluation`` are the metrics among them, if held-out pairs were predicted.
    """
    trained, words = witness.trained, pair_card.words if witness.trained.tasks else _words
    versions = dict(provenance.versions) | ({"commit": provenance.git_commit} if provenance.git_commit else {})
    return _CARD.format(
        front_matter="\n".join(_yaml_lines(_hub(witness, evaluation) | {FACTS: _facts(witness, lineage, files)})),
        name=trained.run_name,
        family=_family(witness),
        num_parameters=witness.num_parameters,
        warning=warning(witness),
        ties=ties(witness),
        **_as_generated(words(witness, _origin(witness), quantity(witness.step, "optimizer step")), witness)._asdict(),
        training=training(witness),
        curve=f"\n![Loss against optimizer steps]({LOSS_CURVE})\n" if LOSS_CURVE in files else "",
        measured_at=measured_at(witness),
        measurements="\n\n".join(
            filter(None, (measurements(witness.validation), pair_card.measurements_of_tasks(witness)))
        ),
        evaluation="" if evaluation is None else f"\n{pair_card.evaluation_section(evaluation)}\n",
        recipe=trained.recipe,
        lineage=table(("stage", ""), lineage.items()),
        settings=json.dumps(trained.settings, indent=1, sort_keys=True, ensure_ascii=False),
        versions=table(("package", ""), versions.items()),
    )


def _as_generated(words: Words, witness: Witness) -> Words:
    """Return the words with code that generates: transformers sizes its cache by the number of the encoder's layers."""
    config = witness.huggingface_config
    is_deep = config.get("num_decoder_layers", 0) > config.get("num_layers", 0)
    return words if not is_deep else words._replace(use=words.use.replace("**inputs, ", "**inputs, use_cache=False, "))


def _words(witness: Witness, origin: str, steps: str) -> Words:
    """Return the words of the card of a model that was pre-trained on text."""
    trained, corpus = witness.trained, witness.trained.settings["corpus"]
    source = ", ".join(code(each) for each in [corpus["source"], *corpus.get("mixed_with", [])])
    revision = f", revision {code(corpus['revision'])}" if corpus.get("revision") else ""
    return Words(
        introduction=_INTRODUCTION.format(origin=origin, steps=steps),
        use=_USE,
        trained_on=f"Trained on {source}{revision}.{languages(trained)} {licence(trained)}",
        data=data(witness),
        measured=_MEASURED,
    )


def _hub(witness: Witness, evaluation: EvaluationMetrics | None) -> dict[str, Any]:
    """Return the fields that the Hugging Face Hub reads."""
    return {
        **_HUB,
        **({"tags": pair_card.TAGS} if witness.trained.tasks else {}),
        **hub_licence(witness.trained.license),
        **({"language": list(witness.trained.languages)} if witness.trained.languages else {}),
        **({"model-index": pair_card.model_index(witness.trained.run_name, evaluation)} if evaluation else {}),
    }


def read_front_matter(card: str) -> Any:
    """Return the parsed front matter of a card. Raises ValueError if there is none."""
    opening, front_matter, _ = (*card.split("---\n", 2), "", "")[:3]
    if opening or not front_matter:
        raise ValueError("there is no front matter")
    try:
        return yaml.safe_load(front_matter)
    except yaml.YAMLError as error:
        raise ValueError(f"the front matter is not YAML ({error})") from error


class RecordedRun(NamedTuple):
    """What a card of this project states of the run: its settings, and the sizes of its splits. Else all are empty.

    ``tasks`` are the prefixes of the tasks of a run on pairs, by their names.
    """

    settings: dict[str, Any]
    data: dict[str, int]
    tasks: dict[str, str]


def recorded_run(card: str) -> RecordedRun:
    """Return what a card states of the run that trained the model."""
    _, heading, rest = card.partition(_SETTINGS)
    try:
        facts = read_front_matter(card)[FACTS] if heading else {}
        settings = json.loads(rest.partition("\n```")[0]) if heading else {}
        stated = settings, facts.get("data", {}), facts.get("tasks", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return RecordedRun({}, {}, {})
    return RecordedRun(*(each if isinstance(each, dict) else {} for each in stated))


def _facts(witness: Witness, lineage: Mapping[str, str], files: Mapping[str, FileDigest]) -> dict[str, Any]:
    return {
        "run_name": witness.trained.run_name,
        "recipe": witness.trained.recipe,
        "run": witness.run_fingerprint,
        "step": witness.step,
        "model": _family(witness),
        "num_parameters": witness.num_parameters,
        "precision": "fp32",
        **(pair_card.facts(witness.trained) if witness.trained.tasks else _facts_of_text(witness.trained.settings)),
        "started_from": witness.trained.start_from,
        "data": witness.trained.data,
        "layout": witness.trained.layout,
        "held_out": witness.validation,
        "lineage": dict(lineage),
        "sha256": {name: digest.sha256 for name, digest in sorted(files.items())},
    }


def _facts_of_text(settings: Mapping[str, Any]) -> dict[str, Any]:
    corpus = settings["corpus"]
    return {
        "corpus_source": corpus["source"],
        **({"corpus_mixed_with": mixed} if (mixed := corpus.get("mixed_with")) else {}),
        "corpus_revision": corpus.get("revision"),
    }


def _yaml_lines(values: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield the lines of a mapping as YAML. Scalars and lists are written as JSON, of which YAML is a superset."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, indent + "  ")
        else:
            yield f"{indent}{key}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    """Return a value as JSON, with ``1e-05`` changed to ``1.0e-05``, because YAML 1.1 reads the former as text."""
    text = json.dumps(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def _family(witness: Witness) -> str:
    model = witness.trained.settings["model"]
    experts = model.get("moe", {}).get("num_experts", 0)
    return f"Switch Transformer (T5 with {experts} experts per sparse layer)" if experts else f"T5 {model['version']}"


def _origin(witness: Witness) -> str:
    """Return what training started from. The lineage has the fingerprint of the folder's content."""
    start = witness.trained.start_from
    return f"starting from the weights of {code(start)} (`start_from` under Lineage)" if start else "from scratch"


def write_loss_curve(witness: Witness, folder: Path) -> None:
    """Draw the loss curve into ``folder``, unless the witness has none."""
    if witness.curve:
        with replacing(folder / LOSS_CURVE) as file:
            file.write(loss_curve(witness))


def loss_curve(witness: Witness) -> bytes:
    """Return the picture. It depends only on the witness and the version of matplotlib, not on its configuration."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context("default"):
        figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), dpi=_DOTS_PER_INCH, layout="constrained")
        axes = figure.add_subplot()
        for name, label in _CURVES.items():
            if points := witness.curve.get(name):
                steps, losses = zip(*points, strict=True)
                axes.plot(steps, losses, linewidth=1.2, marker="." if len(points) <= _FEW_POINTS else "", label=label)
        if (baseline := beside_baseline(witness.validation)[1]) is not None:
            label = pair_card.BASELINE_LABEL if witness.trained.tasks else _BASELINE_LABEL
            axes.axhline(baseline, color="black", linestyle="--", linewidth=1, label=label)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("nats per token")
        axes.grid(alpha=0.3)
        axes.legend()
        picture = io.BytesIO()
        FigureCanvasAgg(figure).print_png(picture, metadata={"Software": None})
    return picture.getvalue()
