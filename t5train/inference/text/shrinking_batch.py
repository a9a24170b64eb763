"""Generates for a batch that gets smaller as its rows end.

``generate()`` computes every row of a batch until the longest has ended. Of texts whose lengths differ, most of that is
padding. So it is stopped once half of the rows have ended, and continues with the others: with their ids, their keys
and values, and what the encoder gave. What a row becomes differs by rounding only.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig

_IDS = frozenset({"decoder_start_token_id", "eos_token_id"})
_ANYWHERE = _IDS | {
    *("pad_token_id", "bos_token_id", "use_cache", "transformers_version", "_from_model_config"),
    *("output_attentions", "output_hidden_states"),
}


def can_shrink(config: "GenerationConfig") -> bool:
    """Return whether generation with the defaults in ``generation_config.json`` may be stopped, and continued.

    Others, such as ``min_new_tokens``, count from where ``generate()`` begins.
    """
    return _IDS <= config.to_diff_dict().keys() <= _ANYWHERE and config.use_cache is not False


def generate_shrinking(
    model: Any, inputs: Mapping[str, Any], max_new_tokens: int, eos_ids: Sequence[int], options: Mapping[str, Any]
) -> list[list[int]]:
    """Return the ids that are generated for each row, without the start: up to EOS and padding, or the most tokens.

    ``inputs`` are the encoder's: ``input_ids`` and ``attention_mask`` int64 [rows, t]. ``options`` are other arguments
    of ``generate()``, without beams.
    """
    import torch  # slow to import, and read only here

    read, encoded, cache = inputs["attention_mask"], model.get_encoder()(**inputs), None
    ids = torch.full_like(read[:, :1], model.generation_config.decoder_start_token_id)
    ends = torch.tensor(eos_ids, device=ids.device)
    rows, found = list(range(len(ids))), dict[int, list[int]]()
    while rows:
        generated = model.generate(
            encoder_outputs=encoded,
            attention_mask=read,
            decoder_input_ids=ids,
            decoder_attention_mask=torch.ones_like(ids),  # without it, all ids would be read again
            past_key_values=cache,
            max_new_tokens=1 + max_new_tokens - ids.shape[1],
            stopping_criteria=[partial(_half_have_ended, ends=ends)],
            return_dict_in_generate=True,
            **options,
        )
        ids, cache = generated.sequences, generated.past_key_values
        found |= dict(zip(rows, ids[:, 1:].tolist(), strict=True))
        if ids.shape[1] > max_new_tokens:
            break
        others = (~_have_ended(ids, ends)).nonzero().flatten()
        rows = [rows[each] for each in others.tolist()]
        read, ids, encoded.last_hidden_state = read[others], ids[others], encoded.last_hidden_state[others]
        cache.batch_select_indices(others)
    return [found[row] for row in range(len(found))]


def _have_ended(ids: Any, ends: Any) -> Any:
    import torch

    return torch.isin(ids[:, 1:], ends).any(1)


def _half_have_ended(ids: Any, _: Any, *, ends: Any, **__: Any) -> Any:
    """Return whether to stop, as ``generate()`` reads it: bool [rows], all the same."""
    ended = _have_ended(ids, ends)
    return (2 * ended.sum() >= len(ended)).expand(len(ended))
