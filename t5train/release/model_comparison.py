"""Compares a loaded model and tokenizer with a witness.

Functions named ``differing_...`` return descriptions of the differences.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5train.data.vocabulary.sentencepiece_model import EOS_ID, PAD_ID, SPECIAL_PIECES, UNK_ID
from t5train.errors import InputError
from t5train.model.model_shape import cache_whole_decoder, resolve
from t5train.model.starting_model import start_fingerprint, tensors_of
from t5train.model.tensor_files import StoredTensors
from t5train.progress import Progress
from t5train.quantities import quantity
from t5train.records.start_copy import require_copied
from t5train.records.witness import GENERATED_PROBE, WITNESS_TENSORS, EncodedPassage, Witness, digest_tensor, of_probe
from t5train.release.certificate import GenerationComparison, ProbeComparison
from t5train.release.export import ADAPTER_WEIGHTS, peft_name
from t5train.release.folder_comparison import differing_values, first_of
from t5train.spec import NUM_SENTINELS, ModelSpec

if TYPE_CHECKING:
    import torch

CLOSE_CHOICE = 1e-4  # relative to the largest logit
_SHARED = "shared.weight"
_HEAD = "lm_head.weight"
_EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def differing_keys(loading: Mapping[str, Any]) -> list[str]:
    """Return the missing, unexpected and mismatched keys that ``from_pretrained`` reports as its loading info."""
    return [
        f"{key.replace('_', ' ')} while loading: {first_of(map(str, names))}"
        for key, names in sorted(loading.items())
        if names
    ]


def differing_tensors(model: "torch.nn.Module", witness: Witness, progress: Progress) -> list[str]:
    """Compare names, shapes and bytes of all parameters, tied ones once, and their number of elements."""
    parameters = dict(model.named_parameters())
    found = []
    if missing := sorted(witness.tensors.keys() - parameters.keys()):
        found.append(f"{quantity(len(missing), 'recorded tensor')} missing from the export: {first_of(missing)}")
    if extra := sorted(parameters.keys() - witness.tensors.keys()):
        found.append(f"{quantity(len(extra), 'tensor')} of the export without a record: {first_of(extra)}")
    common = sorted(witness.tensors.keys() & parameters.keys())
    changed = []
    for done, name in enumerate(common, start=1):
        expected = witness.tensors[name]
        if tuple(parameters[name].shape) != expected.shape or digest_tensor(parameters[name]) != expected.sha256:
            changed.append(f"{name} {list(parameters[name].shape)}")
        progress("tensors compared", done, len(common))
    if changed:
        found.append(f"{quantity(len(changed), 'tensor')} unlike the recorded fp32 masters: {first_of(changed)}")
    if (elements := sum(parameter.numel() for parameter in parameters.values())) != witness.num_parameters:
        found.append(f"the export has {elements} parameters, but {witness.num_parameters} were recorded")
    return found


def start_model(witness: Witness, start_from: str | None, progress: Progress) -> StoredTensors:
    """Open the model that the adapter is for. Raises InputError unless it is the one that training started from."""
    if start_from is None:
        raise InputError(
            f"run {witness.trained.run_name} trained adapters, which are certified with the model that they are for. "
            "Name its folder (--start-from)"
        )
    require_copied(start_from)
    model = ModelSpec.model_validate(witness.trained.settings["model"] | {"start_from": start_from})
    if (found := start_fingerprint(model, progress)) != (expected := witness.inputs["start_from"]):
        raise InputError(
            f"{start_from} is not the model that run {witness.trained.run_name} started from: its fingerprint is "
            f"{str(found)[:12]}, that of the start {expected[:12]}. Give the folder of that model, unchanged"
        )
    return StoredTensors(tensors_of(model, resolve(model, witness.huggingface_config["vocab_size"])) or {})


def differing_adapter(folder: Path, start: StoredTensors, witness: Witness, progress: Progress) -> list[str]:
    """Compare the adapter's factors with the recorded ones, and the start model with their product with the tensors.

    ``start`` are the tensors of the model that training started from. The files' headers have been compared.
    """
    from safetensors.torch import load_file

    from t5train.model.lora import LORA_A, LORA_B, merged

    lora = witness.trained.lora
    factors = load_file(folder / ADAPTER_WEIGHTS)
    digests = {name: recorded.sha256 for name, recorded in witness.adapters.items()}
    changed = [name for name, sha256 in digests.items() if digest_tensor(factors[peft_name(name)]) != sha256]
    other_sums = []
    for done, (name, recorded) in enumerate(witness.tensors.items(), start=1):
        tensor = start.whole(name)
        if name + LORA_A in witness.adapters:
            a, b = (factors[peft_name(name + factor)] for factor in (LORA_A, LORA_B))
            tensor = merged(tensor, a, b, lora["alpha"] / lora["rank"])
        if digest_tensor(tensor) != recorded.sha256:
            other_sums.append(name)
        progress("tensors merged and compared", done, len(witness.tensors))
    found = {
        f"of {ADAPTER_WEIGHTS} unlike the recorded fp32 masters": changed,
        "unlike the start model with its adapter": other_sums,
    }
    return [f"{quantity(len(names), 'tensor')} {how}: {first_of(names)}" for how, names in found.items() if names]


def expected_ties(witness: Witness) -> dict[str, str]:
    """Return the parameters that must be tied, as a mapping from each alias to the parameter that it shares.

    These are the ties of every T5, the tie of the output layer if the witness's configuration has it, and the ties that
    the engine recorded.
    """
    head = {_HEAD: _SHARED} if witness.huggingface_config.get("tie_word_embeddings", True) else {}
    return dict.fromkeys(_EMBEDDINGS, _SHARED) | head | witness.ties


def differing_ties(model: "torch.nn.Module", witness: Witness) -> list[str]:
    """Return aliases that do not share storage with their owner, and an output layer that does but must not."""
    at = {name: tensor.data_ptr() for name, tensor in model.state_dict(keep_vars=True).items()}
    ties = expected_ties(witness)
    found = [f"{alias} is not tied to {owner}" for alias, owner in ties.items() if at.get(alias) != at.get(owner)]
    if _HEAD not in ties and at.get(_HEAD) == at.get(_SHARED):
        found.append(f"{_HEAD} is tied to {_SHARED}, but must not be")
    return found


def compare_probes(
    model: "torch.nn.Module", witness: Witness, folder: Path, device: str, progress: Progress
) -> Iterator[tuple[str, ProbeComparison]]:
    """Run each probe's inputs through the model and compare the logits with the recorded ones."""
    import torch
    from safetensors.torch import load_file

    recorded = load_file(folder / WITNESS_TENSORS)
    with torch.inference_mode():
        for done, probe in enumerate(witness.probes, start=1):
            inputs = {key: ids.to(device) for key, ids in of_probe(recorded, probe).items()}
            output = model(**inputs, use_cache=False)
            yield probe, compare_logits(output.logits.cpu(), recorded[f"{probe}.logits"])
            progress("probes compared", done, len(witness.probes))


def compare_logits(logits: "torch.Tensor", recorded: "torch.Tensor") -> ProbeComparison:
    """Compare logits, both [b, t, vocab]: bit equality, and largest difference (also relative to the largest logit)."""
    import torch

    if logits.shape != recorded.shape or logits.dtype != recorded.dtype:
        return ProbeComparison(
            shape=tuple(logits.shape), bit_equal=False, max_difference=math.inf, max_relative_difference=math.inf
        )
    difference = (logits - recorded).abs().max().item()
    return ProbeComparison(
        shape=tuple(logits.shape),
        bit_equal=torch.equal(logits.view(torch.int32), recorded.view(torch.int32)),
        max_difference=difference,
        max_relative_difference=difference / max(recorded.abs().max().item(), torch.finfo(torch.float32).tiny),
    )


def differing_probes(probes: Mapping[str, ProbeComparison], relative_tolerance: float) -> list[str]:
    """Return probes whose logits are not finite, or differ by more than the tolerance (0 requires equal bits)."""
    found = []
    for probe, seen in probes.items():
        if seen.bit_equal and not math.isfinite(seen.max_difference):
            found.append(f"logits of probe {probe!r} match the recorded ones but are not finite: the model is unusable")
            continue
        near = relative_tolerance > 0 and seen.max_relative_difference <= relative_tolerance
        if not (seen.bit_equal or near):
            found.append(
                f"logits of probe {probe!r} differ by up to {seen.max_difference:.3g} "
                f"({seen.max_relative_difference:.3g} of the largest, {relative_tolerance:g} allowed)"
            )
    return found


def differing_settings(model: Any, witness: Witness) -> list[str]:
    """Return settings of a loaded model that differ from those that transformers derives from the recorded ones."""
    from transformers import AutoConfig, GenerationConfig

    pairs = {
        "configuration": (AutoConfig.for_model(**witness.huggingface_config), model.config),
        "generation configuration": (GenerationConfig(**witness.generation_config), model.generation_config),
    }
    return [
        f"the loaded {what} differs: {first_of(changed)}"
        for what, (expected, found) in pairs.items()
        if (changed := list(differing_values(_settings(expected), _settings(found))))
    ]


def _settings(config: Any) -> dict[str, Any]:
    """Return all settings, including defaults, except the model's path and the requested dtype."""
    return {key: value for key, value in config.to_dict().items() if key not in {"_name_or_path", "dtype"}}


def compare_generation(
    model: Any, witness: Witness, folder: Path, device: str, relative_tolerance: float
) -> tuple[GenerationComparison, list[str]]:
    """Compare greedy ``generate()`` of the export with the recorded ids.

    ``generate()`` caches keys and values of earlier steps, so its logits may be rounded differently. Therefore a
    sequence is compared up to the first choice that was too close to be reproducible.
    """
    import torch
    from safetensors.torch import load_file

    recorded = load_file(folder / WITNESS_TENSORS)
    expected, margins = (recorded[f"{GENERATED_PROBE}.{key}"] for key in ("generated", "margins"))
    inputs = {key: ids.to(device) for key, ids in of_probe(recorded, GENERATED_PROBE).items()}
    del inputs["decoder_input_ids"]
    cache_whole_decoder(model.config)
    with torch.inference_mode():
        found = model.generate(**inputs, max_new_tokens=margins.shape[1]).cpu()
    close = max(relative_tolerance, CLOSE_CHOICE)
    rows = [
        _compare_sequence(one, other, margin, close, witness.generation_config["pad_token_id"])
        for one, other, margin in zip(expected.tolist(), found.tolist(), margins.tolist(), strict=True)
    ]
    wrong = [place for _, place in rows if place is not None]
    comparison = GenerationComparison(sequences=len(rows), tokens_compared=sum(tokens for tokens, _ in rows))
    return comparison, (
        [f"generated differently: {len(wrong)} of {quantity(len(rows), 'sequence')}, first at token {wrong[0]}"]
        if wrong
        else []
    )


def _compare_sequence(
    expected: list[int], found: list[int], margins: list[float], close: float, pad_id: int
) -> tuple[int, int | None]:
    """Return the number of tokens compared, and the index of the first that differs although its choice was clear."""
    padded = found + [pad_id] * (len(expected) - len(found))
    for place, (one, other) in enumerate(zip(expected, padded, strict=False)):
        if one != other:
            return place, None if place and margins[place - 1] <= close else place
    return len(expected), None if len(padded) == len(expected) else len(expected)


def differing_tokenizer(tokenizer: Any, spiece: Path, witness: Witness) -> list[str]:
    """Return how a loaded tokenizer differs from vocabulary and witness: ids, special tokens, passages, decoding."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(spiece))
    pieces = [processor.id_to_piece(index) for index in range(len(processor))]
    sentinels = [f"<extra_id_{index}>" for index in range(NUM_SENTINELS)]
    return [
        *_differing_ids(tokenizer, [*pieces, *reversed(sentinels)], witness.huggingface_config["vocab_size"]),
        *_differing_special(tokenizer, sentinels),
        *differing_passages(tokenizer, witness.passages),
        *_differing_texts(tokenizer, processor, witness.passages),
    ]


def differing_passages(tokenizer: Any, passages: Sequence[EncodedPassage]) -> list[str]:
    """Describe held-out passages that are not encoded as training encoded them."""
    found = [index for index, each in enumerate(passages) if tokenizer(each.text)["input_ids"] != each.ids]
    if not found:
        return []
    text = passages[found[0]].text[:40]
    return [f"{len(found)} of {len(passages)} held-out passages have other ids than in training, first {text!r}"]


def _differing_ids(tokenizer: Any, tokens: list[str], model_ids: int) -> Iterator[str]:
    if len(tokenizer) != len(tokens):
        yield f"the tokenizer has {len(tokenizer)} ids, but the vocabulary with its sentinels has {len(tokens)}"
    if len(tokenizer) > model_ids:
        yield f"the tokenizer has {len(tokenizer)} ids, but the model has {model_ids}"
    ids = list(range(min(len(tokens), len(tokenizer))))
    wrong = [
        index
        for index, back, token in zip(
            ids, tokenizer.convert_tokens_to_ids(tokens[: len(ids)]), tokenizer.convert_ids_to_tokens(ids), strict=True
        )
        if back != index or token != tokens[index]
    ]
    if wrong:
        yield f"{len(wrong)} ids map to other pieces than in the vocabulary, first {wrong[0]} ({tokens[wrong[0]]!r})"


def _differing_special(tokenizer: Any, sentinels: list[str]) -> Iterator[str]:
    expected = dict(zip(("pad", "eos", "unk"), zip(SPECIAL_PIECES, (PAD_ID, EOS_ID, UNK_ID), strict=True), strict=True))
    for name, (token, index) in expected.items():
        found = getattr(tokenizer, f"{name}_token"), getattr(tokenizer, f"{name}_token_id")
        if found != (token, index):
            yield f"the tokenizer's {name} token is {found[0]} ({found[1]}), but should be {token} ({index})"
    ids = tokenizer.convert_tokens_to_ids(sentinels)
    used = [index for index in tokenizer(" ".join(sentinels))["input_ids"] if index in set(ids)]
    if used != ids:
        yield "sentinels in a text are not encoded as their ids"
    if tokenizer("")["input_ids"] != [EOS_ID]:
        yield "the tokenizer does not end a text with a single </s>"


def left_out_line(passages: Sequence[EncodedPassage]) -> str:
    """Return how many passages ``differing_tokenizer`` does not decode, and the first; empty if there are none."""
    found = [each.text for each in passages if UNK_ID in each.ids]
    if not found:
        return ""
    return (
        f"{len(found)} of {len(passages)} held-out passages have unknown characters, which each library decodes "
        f"differently: only their ids are compared, not their decoded text. The first is {found[0][:40]!r}"
    )


def _differing_texts(tokenizer: Any, processor: Any, passages: Sequence[EncodedPassage]) -> list[str]:
    """Describe passages whose ids do not decode as with SentencePiece.

    Passages with unknown characters are left out, because each library decodes them differently.
    """
    known = [each.ids for each in passages if UNK_ID not in each.ids]
    wrong = [ids for ids in known if tokenizer.decode(ids, skip_special_tokens=True) != processor.decode(ids)]
    return [f"{len(wrong)} of {len(known)} held-out passages are decoded to another text"] if wrong else []
