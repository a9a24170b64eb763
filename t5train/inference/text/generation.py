"""Generation with a T5: what it puts into the gaps of a text."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from t5train.inference.model_folder import ModelFolder, chosen_device
from t5train.inference.text.decoding import Decoder, GenerationSpec, Output
from t5train.spec import NUM_SENTINELS

_LEAST_NEW_TOKENS, _TOKENS_A_SPAN = 64, 16
_SENTINEL = re.compile("<extra_id_([0-9]+)>")
_SPACE = "\u2581"  # SentencePiece's symbol for a space, with which a piece begins a word


_USUAL = GenerationSpec()


class Generated(NamedTuple):
    """What a model generated for a text.

    ``spans`` has the text for each sentinel of ``text``; None if the model generated none. ``filled`` is the text with
    the spans put in, or the generated text if there were no sentinels. ``generated`` is all that was generated, with
    sentinels. ``ended`` is whether the model ended it, before the most tokens that were allowed. ``remarks`` are
    sentences about the text that explain a poor result.
    """

    text: str
    spans: dict[str, str | None]
    filled: str
    generated: str
    input_tokens: int
    new_tokens: int
    ended: bool
    remarks: tuple[str, ...]


def generate(
    path: Path, texts: Iterable[str], spec: GenerationSpec = _USUAL, device: str | None = None
) -> Iterator[Generated]:
    """Load a T5, and yield for each text what the model puts into its gaps ``<extra_id_0>``, ``<extra_id_1>``, ...

    The result equals that of ``generate()`` of transformers for each text alone, in fp32. If that ends before the last
    gap, the text is generated again, with ``</s>`` allowed only after the last sentinel.

    Args:
        path: Folder with config.json, safetensors and a vocabulary: an export of this project, or any other T5.
        texts: The texts. One is taken, and its result yielded, at a time.
        spec: How to generate. The most tokens, if left out, are those of the longest targets of a model that was
            fine-tuned by this project, otherwise 16 for each sentinel, and at least 64.
        device: Device to use, such as ``cuda:1`` or ``cpu``; this machine's accelerator, if it has one, if left out.

    Returns:
        An iterator over the results, in the order of the texts.

    Raises:
        InputError: The folder is missing or incomplete, its weights are pickled, or the device is not available.
        SpecError: The model is not a T5.

    """
    folder = ModelFolder.open(path)
    return _generated(folder, texts, spec, chosen_device(device))


def _generated(folder: ModelFolder, texts: Iterable[str], spec: GenerationSpec, device: str) -> Iterator[Generated]:
    decoder = Decoder(folder, device)
    for text in texts:
        each = spec._replace(max_new_tokens=spec.max_new_tokens or usual_new_tokens(folder, text))
        yield from generate_batch(decoder, [text], each)


def usual_new_tokens(folder: ModelFolder, text: str) -> int:
    """Return how many tokens are generated for a text at most, unless something else is asked for."""
    return folder.target_tokens or max(_LEAST_NEW_TOKENS, _TOKENS_A_SPAN * len(sentinels_in(text)))


def generate_batch(decoder: Decoder, texts: Sequence[str], spec: GenerationSpec, **options: Any) -> list[Generated]:
    """Return what a loaded model generates for each text, with at most ``spec.max_new_tokens`` each.

    Padding changes logits by rounding, so a result can differ from that for the text alone where two tokens are about
    equally likely. With sampling, it depends on the other texts. ``options`` are more arguments of ``generate()``.
    """
    outputs = decoder.outputs(texts, spec, **options)
    return [
        _described(decoder, text, *_until_last_gap(decoder, text, output, spec, options))
        for text, output in zip(texts, outputs, strict=True)
    ]


def _until_last_gap(
    decoder: Decoder, text: str, output: Output, spec: GenerationSpec, options: Mapping[str, Any]
) -> tuple[Output, bool | None]:
    """Generate again if the output ends before the last gap. Returns whether that ends early, too; else None."""
    sentinels = sentinels_in(text)
    if not (sentinels and is_as_trained(sentinels)):
        return output, None
    last, eos = decoder.tokenizer.convert_tokens_to_ids(sentinels[-1]), decoder.tokenizer.eos_token_id
    if not output.ended or last in output.ids:
        return output, None
    processors = [partial(_without_early_end, last=last, eos=eos)]
    (again,) = decoder.outputs([text], spec, logits_processor=processors, **options)
    return (again, False) if last in again.ids else (output, True)


def _described(decoder: Decoder, text: str, output: Output, ends_early: bool | None) -> Generated:
    sentinels, tokenizer = sentinels_in(text), decoder.tokenizer
    # The model's vocabulary is padded: it may generate ids that stand for nothing.
    pieces = [piece for piece in tokenizer.convert_ids_to_tokens(output.ids) if piece is not None]
    spans = spans_of(pieces, sentinels)
    return Generated(
        text=text,
        spans={each: text_of(spans[each], tokenizer) if each in spans else None for each in sentinels},
        filled=filled(text, spans, tokenizer) if sentinels else decoder.text_of(output.ids),
        generated=text_of([piece for piece in pieces if piece not in ("<pad>", "</s>")], tokenizer),
        input_tokens=output.input_tokens,
        new_tokens=len(output.ids),
        ended=output.ended,
        remarks=tuple(_remarks(decoder.folder, text, sentinels, output.input_tokens, ends_early)),
    )


def _without_early_end(input_ids: Any, scores: Any, last: int, eos: int) -> Any:
    """Forbid ``eos`` in the rows of ``input_ids`` [n, t] without ``last``; returns scores [n, vocabulary]."""
    scores[(input_ids != last).all(1), eos] = float("-inf")
    return scores


def _remarks(
    folder: ModelFolder, text: str, sentinels: list[str], input_tokens: int, ends_early: bool | None
) -> Iterator[str]:
    """Yield what explains a poor result. ``ends_early``: whether a second attempt also ended before the last gap."""
    if folder.run.tasks:
        yield from _missing_prefix(folder.run.tasks, text)
    elif not sentinels:
        yield (
            "the text has no <extra_id_0>: a pre-trained T5 fills in gaps that are marked by <extra_id_0>, "
            "<extra_id_1>, ..., and what it generates without one means little"
        )
    elif not is_as_trained(sentinels):
        yield (
            f"the text has the sentinels {', '.join(sentinels)}, but the model was trained with <extra_id_0>, "
            "<extra_id_1>, ... in this order. Number them in this way"
        )
    if ends_early is not None:
        result = "gaps stay unfilled, also without it" if ends_early else "the text was generated again without it"
        yield f"the model wrote </s>, the end of a document, before the last gap ({sentinels[-1]}): {result}"
    if input_tokens > folder.trained_tokens:
        yield (
            f"the text has {input_tokens} tokens, but the model was trained with at most {folder.trained_tokens}: the "
            "result may be poor. Shorten the text"
        )


def _missing_prefix(tasks: Mapping[str, str], text: str) -> Iterator[str]:
    """Yield a sentence if the text begins with none of the prefixes of ``tasks``, which may be empty."""
    prefixes = list(map(str, tasks.values()))
    if not text.startswith(tuple(prefixes)):
        named = ", ".join(map(json.dumps, prefixes))
        yield f"the text has no prefix that the model was fine-tuned with ({named}): begin it with that of its task"


def sentinels_in(text: str) -> list[str]:
    """Return the sentinels of a text in their order, each once."""
    found = [match[0] for match in _SENTINEL.finditer(text) if int(match[1]) < NUM_SENTINELS]
    return list(dict.fromkeys(found))


def is_as_trained(sentinels: Sequence[str]) -> bool:
    """Return whether sentinels count up from ``<extra_id_0>``, as in every text that a T5 was pre-trained with."""
    return list(sentinels) == [f"<extra_id_{index}>" for index in range(len(sentinels))]


def spans_of(pieces: Sequence[str], sentinels: Sequence[str]) -> dict[str, list[str]]:
    """Return the pieces after each of ``sentinels`` in what a model generated, up to its next sentinel or its end.

    A sentinel that was not generated is left out. Of one that was generated twice, the first counts.
    """
    spans: dict[str, list[str]] = {}
    current: list[str] | None = None
    for piece in pieces:
        if piece in ("</s>", "<pad>"):
            current = None
        elif _SENTINEL.fullmatch(piece):
            current = spans.setdefault(piece, []) if piece in sentinels and piece not in spans else None
        elif current is not None:
            current.append(piece)
    return spans


def filled(text: str, spans: Mapping[str, Sequence[str]], tokenizer: Any) -> str:
    """Return the text with the spans in place of their sentinels. A sentinel without a span stays.

    The space before a sentinel is dropped if its span continues the word before it, or is empty.
    """

    def replacement(match: re.Match[str]) -> str:
        space, sentinel = match.groups()
        if sentinel not in spans:
            return match[0]
        span = spans[sentinel]
        begins_word = bool(span) and span[0].startswith(_SPACE)
        return (space if begins_word else "") + text_of(span, tokenizer)

    return re.sub(r"(\s*)(<extra_id_[0-9]+>)", replacement, text)


def text_of(span: Sequence[str], tokenizer: Any) -> str:
    """Return the text of a span of pieces."""
    return str(tokenizer.convert_tokens_to_string(list(span))).strip() if span else ""
