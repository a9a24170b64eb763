"""README.md of an export: what the model is, and everything it came from."""

import json
from collections.abc import Mapping
from typing import Any

from t5train.locations import local_folder, redacted
from t5train.records import Provenance
from t5train.spec import RunSpec
from t5train.witness import Witness

_CARD = """\
---
library_name: transformers
pipeline_tag: text2text-generation
tags:
- t5
- span-corruption
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

`certificate.json` says how a fresh process held this folder against what the training engine recorded of its own
fp32 weights; `manifest.json` holds size and sha256 of every file. `t5-pretrain verify FOLDER_OR_URL` compares them.

## Data and licence

Trained on {source}{revision}. The licence of this model follows from the licence of that text, which this tool
does not know: state it wherever you share the model (this folder is to stay as it was certified).

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


def model_card(spec: RunSpec, witness: Witness, lineage: Mapping[str, str], provenance: Provenance) -> str:
    """The card, in Markdown; the same text for the same model, made with the same versions."""
    settings = spec.identity()
    settings["corpus"]["source"] = shareable_source(spec.corpus.source)
    versions = dict(provenance.versions) | ({"commit": provenance.git_commit} if provenance.git_commit else {})
    return _CARD.format(
        name=spec.run_name,
        family=_family(spec),
        num_parameters=witness.num_parameters,
        origin=_origin(spec),
        step=witness.step,
        source=f"`{settings['corpus']['source']}`",
        revision=f", revision `{spec.corpus.revision}`" if spec.corpus.revision else "",
        validation=_table("measurement", witness.validation),
        recipe=spec.recipe,
        lineage=_table("stage", lineage),
        settings=json.dumps(settings, indent=1, sort_keys=True, ensure_ascii=False),
        versions=_table("package", versions),
    )


def shareable_source(source: str) -> str:
    """A corpus source without credentials, and without the folders of the machine it lay on."""
    local = local_folder(source)
    return redacted(source) if local is None else local.name


def _family(spec: RunSpec) -> str:
    experts = spec.model.moe.num_experts
    return f"Switch Transformer (T5 with {experts} experts a sparse layer)" if experts else f"T5 {spec.model.version}"


def _origin(spec: RunSpec) -> str:
    """Lineage has the fingerprint of what the folder held."""
    start = local_folder(spec.model.start_from) if spec.model.start_from else None
    return f"from the weights of `{start.name}` on (`start_from` under Lineage)" if start else "from scratch"


def _table(heading: str, values: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {_cell(value)} |" for name, value in values.items()]
    return "\n".join([f"| {heading} | |", "|---|---|", *rows])


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"`{value}`"
