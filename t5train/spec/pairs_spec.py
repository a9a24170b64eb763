"""Settings of fine-tuning: the pairs of source and target that a model is trained on."""

from typing import Literal, NamedTuple

from pydantic import Field

from t5train.spec.training_spec import MixingSpec


GENERATED = {"reverse_digits": "reverse: ", "sort_digits": "sort: "}
"""The prefixes of pairs that are made on this machine, by their names."""


class RowLengths(NamedTuple):
    """The lengths of a row of a batch in tokens, EOS included: of the encoder's input, and of the decoder's target."""

    input_tokens: int
    target_tokens: int


class PairsSpec(MixingSpec):
    """Pairs to fine-tune on: where they are, how they are split, and the rows that they are packed into."""

    train: tuple[str, ...] = Field(
        (),
        description="Files of pairs to train on, one for each task: a path, pattern, URL or hf://OWNER/NAME, and after "
        "# what they hold, such as wmt.jsonl#source=translation.en&target=translation.ro&prefix=translate English to "
        "Romanian: &task=en-ro. Empty: the run pre-trains on text",
    )
    validation: tuple[str, ...] = Field(
        (), description="Files of pairs to validate on, named as train is. Empty: a share of train (split)"
    )
    test: tuple[str, ...] = Field(
        (), description="Files of pairs to test on, named as train is. Empty: a share of train (split)"
    )
    split: tuple[int, int, int] = Field(
        (950, 30, 20),
        description="Shares of the pairs for training, validation and test, in thousandths. Pairs with the same source "
        "fall into the same split",
    )
    split_seed: int = Field(0, ge=0, description="Decides which source falls into which split")
    input_tokens: int = Field(256, ge=8, le=16384, description="Length of a row of sources in tokens, EOS included")
    target_tokens: int = Field(256, ge=4, le=16384, description="Length of a row of targets in tokens, EOS included")
    too_long: Literal["cut", "drop", "refuse"] = Field(
        "cut",
        description="What becomes of a pair that is longer than a row. cut: it is shortened, and still ends in EOS",
    )
    pack: bool = Field(True, description="Put several pairs into a row, which do not see each other")
