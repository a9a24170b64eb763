"""The vocabulary of a T5's folder, for text that is evaluated: its ids, its sentinels, and encoding.

``spiece.model`` encodes as training does: no text becomes a control id. A folder that has only ``tokenizer.json`` is
used with the library ``tokenizers``; control ids that it finds in a text are dropped.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from t5train.data.vocabulary.tokenizer import SPIECE, TOKENIZER_JSON, Tokenizer, open_given
from t5train.errors import InputError, SpecError
from t5train.spec import NUM_SENTINELS


class Vocabulary(NamedTuple):
    """``encode`` returns the int32 ids of each text, followed by EOS. Sentinels count down from the first."""

    size: int
    first_sentinel_id: int
    eos_id: int
    encode: Callable[[list[str]], list[np.ndarray]]

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Open the vocabulary of a folder. Raises InputError if it is damaged, or has other sentinels than T5's."""
        if not (folder / SPIECE).is_file():
            return cls._fast(folder / TOKENIZER_JSON)
        try:
            return cls._as_trained(open_given(folder))
        except SpecError as error:
            if not (folder / TOKENIZER_JSON).is_file():
                raise InputError(f"the vocabulary cannot be used: {error}") from error
            return cls._fast(folder / TOKENIZER_JSON)

    @classmethod
    def _as_trained(cls, tokenizer: Tokenizer) -> Self:
        return cls(
            size=tokenizer.vocab_size,
            first_sentinel_id=tokenizer.sentinel_ids[0],
            eos_id=tokenizer.eos_id,
            encode=lambda texts: tokenizer.encode(texts, add_eos=True),
        )

    @classmethod
    def _fast(cls, file: Path) -> Self:
        from tokenizers import Tokenizer as FastTokenizer

        try:
            tokenizer = FastTokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise InputError(f"{file} cannot be read ({error}). Copy it again from where you got the model") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        names = ("</s>", "<pad>", *(f"<extra_id_{index}>" for index in range(NUM_SENTINELS)))
        known = [found for name in names if (found := tokenizer.token_to_id(name)) is not None]
        if len(known) < len(names) or known[2:] != list(range(known[2], known[2] - NUM_SENTINELS, -1)):
            raise InputError(
                f"{file} is not a T5's vocabulary: it must have <pad>, </s>, and the sentinels <extra_id_0> to "
                f"<extra_id_{NUM_SENTINELS - 1}> with descending ids. Choose another model"
            )
        eos_id, first_sentinel_id = known[0], known[2]

        def encode(texts: list[str]) -> list[np.ndarray]:
            found = (np.array(each.ids, np.int32) for each in tokenizer.encode_batch(texts, add_special_tokens=False))
            return [np.append(each[~np.isin(each, known)], np.int32(eos_id)) for each in found]

        return cls(size=tokenizer.get_vocab_size(), first_sentinel_id=first_sentinel_id, eos_id=eos_id, encode=encode)
