"""README.md of an export: what the model is, and everything that it was made from.

The front matter is for programs. It has fields of the Hugging Face Hub and, under ``t5_pretrain``, the facts that the
rest of the card states in words. The text depends only on the witness, the lineage, the digests of the other files and
the versions that made it, so that certification can compare it.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from t5train.records.digests import FileDigest
from t5train.records.identity import Provenance
from t5train.records.witness import Witness

README = "README.md"
FACTS = "t5_pretrain"
_SETTINGS = "\n## Settings\n\n```json\n"
_HUB = {
    "library_name": "transformers",
    "pipeline_tag": "text2text-generation",
    "license": "unknown",
    "tags": ["t5", "span-corruption"],
}
_CARD = """\
---
{front_matter}
---

# {name}

A {family} of {num_parameters:,} parameters in fp32, pre-trained {origin} by span corruption
(Raffel et al. 2020) for {step:,} optimizer steps. It fills in spans of text marked by `<extra_id_0>`,
`<extra_id_1>`, ...; it has not been fine-tuned for anything else.

## Use

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

## Verify

`certificate.json` records how a new process compared this folder with what the training engine recorded of its own
fp32 weights. `manifest.json` has the size and sha256 of every file, and `t5-pretrain verify FOLDER_OR_URL` checks them.

## Data and licence

Trained on {source}{revision}. The licence of this model follows from the licence of that text, which this tool
does not know. State it wherever you share the model, but not in this folder: a changed file no longer verifies.

## Held-out measurements at the last step

{validation}

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


def model_card(
    witness: Witness, lineage: Mapping[str, str], files: Mapping[str, FileDigest], provenance: Provenance
) -> str:
    """Return the card as Markdown. ``files`` are those of the export, without the card and the certificate."""
    trained, corpus = witness.trained, witness.trained.settings["corpus"]
    versions = dict(provenance.versions) | ({"commit": provenance.git_commit} if provenance.git_commit else {})
    return _CARD.format(
        front_matter="\n".join(_yaml_lines(_HUB | {FACTS: _facts(witness, lineage, files)})),
        name=trained.run_name,
        family=_family(witness),
        num_parameters=witness.num_parameters,
        origin=_origin(witness),
        step=witness.step,
        source=f"`{corpus['source']}`",
        revision=f", revision `{corpus['revision']}`" if corpus.get("revision") else "",
        validation=_table("measurement", witness.validation),
        recipe=trained.recipe,
        lineage=_table("stage", lineage),
        settings=json.dumps(trained.settings, indent=1, sort_keys=True, ensure_ascii=False),
        versions=_table("package", versions),
    )


def read_front_matter(card: str) -> Any:
    """Return the parsed front matter of a card. Raises ValueError if there is none."""
    opening, front_matter, _ = (*card.split("---\n", 2), "", "")[:3]
    if opening or not front_matter:
        raise ValueError("there is no front matter")
    try:
        return yaml.safe_load(front_matter)
    except yaml.YAMLError as error:
        raise ValueError(f"the front matter is not YAML ({error})") from error


def recorded_settings(card: str) -> dict[str, Any]:
    """Return the settings of the run that a card of this project states; empty for any other card."""
    _, heading, rest = card.partition(_SETTINGS)
    try:
        stated = json.loads(rest.partition("\n```")[0]) if heading and FACTS in read_front_matter(card) else {}
    except (ValueError, TypeError):
        return {}
    return stated if isinstance(stated, dict) else {}


def _facts(witness: Witness, lineage: Mapping[str, str], files: Mapping[str, FileDigest]) -> dict[str, Any]:
    return {
        "run_name": witness.trained.run_name,
        "recipe": witness.trained.recipe,
        "run": witness.run_fingerprint,
        "step": witness.step,
        "model": _family(witness),
        "num_parameters": witness.num_parameters,
        "precision": "fp32",
        "corpus_source": witness.trained.settings["corpus"]["source"],
        "corpus_revision": witness.trained.settings["corpus"].get("revision"),
        "started_from": witness.trained.start_from,
        "held_out": witness.validation,
        "lineage": dict(lineage),
        "sha256": {name: digest.sha256 for name, digest in sorted(files.items())},
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
    return f"starting from the weights of `{start}` (`start_from` under Lineage)" if start else "from scratch"


def _table(heading: str, values: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {_cell(value)} |" for name, value in values.items()]
    return "\n".join([f"| {heading} | |", "|---|---|", *rows])


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"`{value}`"
