"""Single faults in the files of an export. Each returns the changed bytes and a description of the change."""

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from sentencepiece import sentencepiece_model_pb2

Change = Callable[[bytes, random.Random], tuple[bytes, str]]
Slot = tuple[dict[str, Any] | list[Any], Any]
"""A container and one of its keys."""
GENERATION = {
    "forced_bos_token_id": 7, "forced_eos_token_id": 1, "suppress_tokens": [5, 6], "begin_suppress_tokens": [4],
    "max_length": 3, "min_length": 4, "max_new_tokens": 2, "num_beams": 4, "num_beam_groups": 2, "do_sample": True,
    "temperature": 0.1, "top_k": 3, "top_p": 0.5, "repetition_penalty": 9.0, "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1, "bad_words_ids": [[5]], "length_penalty": -3.0, "early_stopping": True,
    "bos_token_id": 3, "encoder_repetition_penalty": 2.0, "exponential_decay_length_penalty": [1, 2.0],
    "penalty_alpha": 0.6,
}  # fmt: skip
LOADED = {
    "auto_map": {"AutoModelForSeq2SeqLM": "modeling.Model"}, "architectures": ["T5Model"], "quantization_config": {},
    "torch_dtype": "float16", "_name_or_path": "elsewhere", "task_specific_params": {"x": {"prefix": "y"}},
    "chat_template": "{{ x }}", "is_encoder_decoder": False, "prefix": "say: ", "add_bos_token": True,
}  # fmt: skip
NOT_COMPARED = ("predicting", "held_out")
"""Of metrics.json: how pairs were chosen and predicted, which nothing else records."""
CARD = {"base_model": "somebody/model", "license": "mit", "datasets": ["c4"], "language": "fr"}


def parsed(name: str, content: bytes) -> Any:
    """What programs read in a file. If a fault leaves it unchanged, it is no fault."""
    if name.endswith(".json"):
        return _exact(json.loads(content))
    if name == "README.md":
        return _exact(yaml.safe_load(content.decode().split("---\n")[1]))
    return _tensors(content) if name.endswith(".safetensors") else content


def _tensors(content: bytes) -> dict[str, Any]:
    """The metadata and tensors of a safetensors file. Two equal tensors can be exchanged without a change."""
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    return {
        name: entry if name == "__metadata__" else (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def _exact(value: Any) -> str:
    """A text that differs for 1, 1.0 and true, and does not depend on the order of keys."""
    return json.dumps(value, sort_keys=True)


def _slots(value: Any) -> Iterator[Slot]:
    """Yield every leaf, and every container below the top."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield value, key
        yield from _slots(each)


def _leaf(document: Any, generator: random.Random) -> Slot:
    """Choose a leaf, mostly from small objects: otherwise, nearly every choice would be in the vocabulary."""
    slots = [each for each in _slots(document) if not isinstance(each[0][each[1]], dict | list)]
    in_small_objects = [each for each in slots if len(each[0]) < 1000 and not isinstance(each[0], list)]
    return generator.choice(in_small_objects if in_small_objects and generator.random() < 0.7 else slots)


def _other_value(value: Any, generator: random.Random) -> Any:
    """Another value of the same type; null becomes a number."""
    match value:
        case bool():
            return not value
        case int():
            return value + generator.choice([-1, 1, 2, 128])
        case float():
            return generator.choice([value + 0.5, -value - 1.0, value * 1.0001 + 1e-9])
        case str():
            return generator.choice([value + "x", value[:-1] + "~", value.upper() + "Y"])
        case _:
            return 1


def _change_leaf(document: Any, generator: random.Random) -> str:
    container, key = _leaf(document, generator)
    before = container[key]
    container[key] = _other_value(before, generator)
    return f"{key!r}: {before!r} -> {container[key]!r}"[:200]


def _change_type(document: Any, generator: random.Random) -> str:
    container, key = _leaf(document, generator)
    before = container[key]
    container[key] = generator.choice([each for each in (None, True, 1, 0, "x", 0.5, [], {}) if each is not before])
    return f"{key!r}: {before!r} -> {container[key]!r}"[:200]


def _delete(document: Any, generator: random.Random) -> str:
    container, key = (
        generator.choice(list(_slots(document))) if generator.random() < 0.5 else _leaf(document, generator)
    )
    before = container[key]
    del container[key]
    return f"{key!r}: {before!r} deleted"[:200]


def _swap(document: Any, generator: random.Random) -> str:
    containers = [document, *(each[0][each[1]] for each in _slots(document))]
    chosen = generator.choice([each for each in containers if isinstance(each, dict | list) and len(each) > 1])
    keys = list(chosen) if isinstance(chosen, dict) else range(len(chosen))
    one, other = generator.sample(list(keys), 2)
    chosen[one], chosen[other] = chosen[other], chosen[one]
    return f"{one!r} and {other!r} swapped"


def _duplicate(document: Any, generator: random.Random) -> str:
    lists = [each[0][each[1]] for each in _slots(document) if isinstance(each[0][each[1]], list) and each[0][each[1]]]
    if not lists:
        return "nothing"
    chosen = generator.choice(lists)
    chosen.append(copy.deepcopy(generator.choice(chosen)))
    return f"{chosen[-1]!r} duplicated"[:200]


def _append(lines: list[str], generator: random.Random) -> str:
    lines.append(generator.choice(lines))
    return f"{lines[-1]!r} duplicated"[:200]


def _add(values: dict[str, Any]) -> Callable[[Any, random.Random], str]:
    def add(document: Any, generator: random.Random) -> str:
        key = generator.choice([key for key in values if document.get(key) != values[key]])
        document[key] = values[key]
        return f"{key!r}: {values[key]!r} added"

    return add


def _shuffle(document: Any, generator: random.Random) -> str:
    if "model" not in document:
        return "nothing"
    pieces = document["model"]["vocab"]
    first = generator.randrange(3, len(pieces) - 2)
    some = pieces[first:]
    generator.shuffle(some)
    pieces[first:] = some
    return f"pieces shuffled from {first} on"


def _in_json(change: Callable[[Any, random.Random], str]) -> Change:
    def changed(content: bytes, generator: random.Random) -> tuple[bytes, str]:
        document = json.loads(content)
        described = change(document, generator)
        return json.dumps(document, ensure_ascii=False).encode(), described

    return changed


def _in_card(change: Callable[[Any, random.Random], str]) -> Change:
    def changed(content: bytes, generator: random.Random) -> tuple[bytes, str]:
        _, front_matter, text = content.decode().split("---\n", 2)
        document = yaml.safe_load(front_matter)
        described = change(document, generator)
        return f"---\n{yaml.safe_dump(document, sort_keys=False)}---\n{text}".encode(), described

    return changed


def _in_index(change: Callable[[Any, random.Random], str]) -> Change:
    """Wrap a change, to apply it to the metrics in the front matter, if it has any."""
    return _in_card(
        lambda document, generator: change(document["model-index"], generator) if "model-index" in document else "none"
    )


def _in_metrics(change: Callable[[Any, random.Random], str]) -> Change:
    """Wrap a change of JSON, to apply it to all that is compared."""

    def changed(document: Any, generator: random.Random) -> str:
        kept = {key: document.pop(key) for key in NOT_COMPARED}
        described = change(document, generator)
        document.update(kept)
        return described

    return _in_json(changed)


def _in_a_line(change: Callable[[Any, random.Random], str]) -> Change:
    """Wrap a change of JSON, to apply it to a line of several."""

    def changed(content: bytes, generator: random.Random) -> tuple[bytes, str]:
        lines = content.splitlines()
        number = generator.randrange(len(lines))
        lines[number], described = _in_json(change)(lines[number], generator)
        return b"\n".join([*lines, b""]), f"line {number + 1}, {described}"

    return changed


def _in_lines(change: Callable[[Any, random.Random], str]) -> Change:
    """Wrap a change of a list, to apply it to all lines."""

    def changed(content: bytes, generator: random.Random) -> tuple[bytes, str]:
        lines = [each.decode() for each in content.splitlines()]
        described = change(lines, generator)
        return "".join(f"{each}\n" for each in lines).encode(), described

    return changed


def _in_facts(change: Callable[[Any, random.Random], str]) -> Change:
    """Wrap a change, to apply it to the facts that this project writes into the front matter."""
    return _in_card(lambda document, generator: change(document["t5_pretrain"], generator))


def _in_header(change: Callable[[dict[str, Any], bytes, random.Random], tuple[bytes, str]]) -> Change:
    """Wrap ``change``, which edits the header in place and returns the tensors' bytes and a description."""

    def changed(content: bytes, generator: random.Random) -> tuple[bytes, str]:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        data, described = change(header, content[8 + length :], generator)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text + data, described

    return changed


def _choose_tensor(header: dict[str, Any], generator: random.Random) -> str:
    return generator.choice([name for name in header if name != "__metadata__"])


def _flip_bit(header: dict[str, Any], data: bytes, generator: random.Random) -> tuple[bytes, str]:
    position, bit = generator.randrange(len(data)), generator.randrange(8)
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :], f"bit {bit} of byte {position}"


def _overwrite(header: dict[str, Any], data: bytes, generator: random.Random) -> tuple[bytes, str]:
    name = _choose_tensor(header, generator)
    start, end = header[name]["data_offsets"]
    return data[:start] + bytes([1]) * (end - start) + data[end:], f"{name} overwritten"


def _rename(header: dict[str, Any], data: bytes, generator: random.Random) -> tuple[bytes, str]:
    name = _choose_tensor(header, generator)
    header[name + generator.choice(["", "s"]) + "x"] = header.pop(name)
    return data, f"{name} renamed"


def _exchange(header: dict[str, Any], data: bytes, generator: random.Random) -> tuple[bytes, str]:
    """Exchange two tensors of the same shape. Changes nothing if both are the same tensor."""
    name = _choose_tensor(header, generator)
    same_shape = [each for each in header if header[each].get("shape") == header[name]["shape"]]
    other = generator.choice(same_shape)
    header[name], header[other] = header[other], header[name]
    return data, f"{name} and {other} exchanged"


def _reshape(header: dict[str, Any], data: bytes, generator: random.Random) -> tuple[bytes, str]:
    name = _choose_tensor(header, generator)
    header[name]["shape"] = [*reversed(header[name]["shape"]), 1]
    return data, f"{name} reshaped"


def _retype(header: dict[str, Any], data: bytes, generator: random.Random) -> tuple[bytes, str]:
    name = _choose_tensor(header, generator)
    header[name]["dtype"] = generator.choice(["I32", "U32"])
    return data, f"{name} retyped"


def _add_tensor(header: dict[str, Any], data: bytes, generator: random.Random) -> tuple[bytes, str]:
    """Add a tensor, for instance one that the files of a tied model may hold twice."""
    name = generator.choice(["lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "more"])
    name = f"{name}.copy" if name in header else name
    header[name] = {"dtype": "F32", "shape": [2, 2], "data_offsets": [len(data), len(data) + 16]}
    return data + bytes(16), f"{name} added"


def _drop(header: dict[str, Any], data: bytes, generator: random.Random) -> tuple[bytes, str]:
    name = max((each for each in header if each != "__metadata__"), key=lambda each: header[each]["data_offsets"][1])
    start = header.pop(name)["data_offsets"][0]
    return data[:start], f"{name} dropped"


def _metadata(header: dict[str, Any], data: bytes, generator: random.Random) -> tuple[bytes, str]:
    header["__metadata__"] = generator.choice([{"format": "tf"}, {}, {"format": "pt", "total_parameters": "1"}])
    return data, f"metadata {header['__metadata__']}"


def _change_spiece(content: bytes, generator: random.Random) -> tuple[bytes, str]:
    model = sentencepiece_model_pb2.ModelProto.FromString(content)
    position = generator.randrange(3, len(model.pieces))
    one, other = model.pieces[position], model.pieces[generator.randrange(3, len(model.pieces))]
    what = generator.choice(["score", "piece", "swap", "normalizer"])
    if what == "score":
        one.score += 0.25
    elif what == "piece":
        one.piece += "x"
    elif what == "swap":
        one.piece, other.piece = other.piece, one.piece
    else:
        model.normalizer_spec.add_dummy_prefix = False
    return model.SerializeToString(), f"{what} of piece {position}"


def _change_picture(content: bytes, generator: random.Random) -> tuple[bytes, str]:
    position = generator.randrange(len(content))
    changed = content[:position] + bytes([content[position] ^ 1 << generator.randrange(8)]) + content[position + 1 :]
    return changed, f"byte {position} of the picture changed"


_IN_DOCUMENTS = {
    "leaf changed": _change_leaf,
    "type changed": _change_type,
    "value deleted": _delete,
    "values swapped": _swap,
    "item duplicated": _duplicate,
}
_JSON = {kind: _in_json(change) for kind, change in _IN_DOCUMENTS.items()}
_TOKENIZER = _JSON | {"key added": _in_json(_add(LOADED))}
FAULTS: dict[str, dict[str, Change]] = {
    "weights": {
        "bit flipped": _in_header(_flip_bit),
        "tensor overwritten": _in_header(_overwrite),
        "tensor renamed": _in_header(_rename),
        "tensors exchanged": _in_header(_exchange),
        "tensor reshaped": _in_header(_reshape),
        "tensor retyped": _in_header(_retype),
        "tensor added": _in_header(_add_tensor),
        "tensor dropped": _in_header(_drop),
        "metadata changed": _in_header(_metadata),
    },
    "model.safetensors.index.json": _JSON,
    "config.json": _TOKENIZER | {"generation key added": _in_json(_add(GENERATION))},
    "generation_config.json": _JSON | {"generation key added": _in_json(_add(GENERATION))},
    "tokenizer.json": _TOKENIZER | {"pieces shuffled": _in_json(_shuffle)},
    "tokenizer_config.json": _TOKENIZER,
    "special_tokens_map.json": _TOKENIZER,
    "spiece.model": {"vocabulary changed": _change_spiece},
    "loss_curve.png": {"picture changed": _change_picture},
    "adapter/adapter_config.json": _JSON,
    "evaluation/metrics.json": {kind: _in_metrics(change) for kind, change in _IN_DOCUMENTS.items()},
    "evaluation/predictions.jsonl": {
        **{kind: _in_a_line(change) for kind, change in _IN_DOCUMENTS.items() if change != _duplicate},
        **{f"line: {kind}": _in_lines(_IN_DOCUMENTS[kind]) for kind in ("value deleted", "values swapped")},
        "line: item duplicated": _in_lines(_append),
    },
    "README.md": {
        **{kind: _in_card(change) for kind, change in _IN_DOCUMENTS.items()},
        **{f"metric: {kind}": _in_index(change) for kind, change in _IN_DOCUMENTS.items()},
        **{f"fact: {kind}": _in_facts(change) for kind, change in _IN_DOCUMENTS.items()},
        "key added": _in_card(_add(CARD)),
    },
}
"""The faults by file (or "weights") and kind."""
