"""Settings of the text, the tokenizer, the token shards and the training objective."""

import re
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import Field, field_validator, model_validator

from t5train.locations import at_home, hub_dataset_name, without_secret
from t5train.spec.known_texts import BUILT_IN
from t5train.spec.overrides import SpecPart

NUM_SENTINELS = 100

Repetition = Literal["duplicates", "near_duplicates", "contaminated"]
"""What training text can repeat; ``t5train.data.checks.repetitions`` defines each."""
REPETITIONS: tuple[Repetition, ...] = get_args(Repetition)
_OF_THE_HUB = ("config", "hub_split", "column")
_LANGUAGE, _LANGUAGES = "^[a-z]{2,3}(-[A-Za-z0-9]{2,8})*$", "language codes such as en or en-US"


class HubText(NamedTuple):
    """Which text of a dataset of the Hugging Face Hub is read."""

    config: str | None = None
    """None: its only or default configuration."""
    split: str = "train"
    column: str = "text"


class CorpusSpec(SpecPart):
    """The text, and how it is split."""

    # Licence and languages are statements about the text: they change no weight.
    execution = frozenset({"workers", "license", "languages"})

    source: str = Field(
        BUILT_IN,
        title="Source",
        description="Text to train on: a file, folder, glob pattern or fsspec URL of .txt, .jsonl, .tsv or "
        ".parquet files, which may be compressed (.gz, .bz2, .xz, .zst); hf://OWNER/NAME, a dataset of the Hugging "
        "Face Hub; psgs_w100 or wiki_dpr, the passages of Wikipedia that DPR reads; or pydocs, Python's own "
        "documentation, which is the demo's text",
    )
    revision: str = Field(
        "",
        title="Revision",
        description="Your name for this state of the text, such as 2026-07; change it when the text at the same "
        "place has changed. For hf://OWNER/NAME and wiki_dpr: a commit, tag or branch of the dataset; empty: the "
        "commit that main has at the first download, which is recorded and used from then on",
    )
    config: str | None = Field(
        None,
        min_length=1,
        title="Configuration",
        description="Configuration (subset) of the dataset hf://OWNER/NAME, such as en. null: its only or default one",
    )
    hub_split: str | None = Field(
        None,
        pattern=r"^\w+([.-]\w+)*$",
        title="Split of the dataset",
        description="Split of the dataset hf://OWNER/NAME that the text is taken from. null: train. corpus.split "
        "divides its documents",
    )
    column: str | None = Field(
        None,
        min_length=1,
        title="Column",
        description="Column of the dataset hf://OWNER/NAME that holds the text. null: text. Its columns id and title "
        "are read, too, if it has them",
    )
    split: tuple[int, int, int] = Field(
        (950, 30, 20),
        title="Split",
        description="Shares of the documents for training, validation and test, in thousandths; they sum to 1000",
    )
    split_seed: int = Field(0, ge=0, title="Split seed", description="Decides which document falls into which split")
    remove: tuple[Repetition, ...] = Field(
        (),
        title="Remove",
        description="Passages to remove from training: duplicates, with the text of another passage; near_duplicates, "
        "most of whose 5-word runs are those of another passage (duplicates, too); contaminated, which share 13 words "
        "in a row with the validation split, the test split or test_sets. If a passage has a copy there, all its "
        "copies are removed from training",
    )
    test_sets: tuple[str, ...] = Field(
        (),
        title="Test sets",
        description="Other texts that training is kept free of, such as a benchmark's test set: paths or URLs, as for "
        "source. Training passages that repeat them are removed as remove says",
    )
    license: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9 .,+()/_-]{0,99}$",
        title="Licence",
        description="Licence of the text, stated on the model card, such as cc-by-sa-4.0. null: none is stated",
    )
    languages: tuple[Annotated[str, Field(pattern=_LANGUAGE, description=_LANGUAGES)], ...] = Field(
        (), title="Languages", description="Codes of the text's languages, stated on the model card, such as en,de"
    )
    workers: int | None = Field(
        None, ge=1, title="Workers", description="Processes that read the text. null: one per core"
    )

    @field_validator("languages", "remove", mode="before")
    @classmethod
    def _a_list_may_be_one_text(cls, given: Any) -> Any:
        return [each.strip() for each in given.split(",")] if isinstance(given, str) else given

    @field_validator("test_sets", mode="before")
    @classmethod
    def _one_test_set_needs_no_list(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given  # names may have commas

    @field_validator("remove")
    @classmethod
    def _each_once_and_in_order(cls, remove: tuple[Repetition, ...]) -> tuple[Repetition, ...]:
        return tuple(each for each in REPETITIONS if each in remove)

    @field_validator("test_sets")
    @classmethod
    def _test_sets_hold_no_secret(cls, test_sets: tuple[str, ...]) -> tuple[str, ...]:
        if not all(each.strip() for each in test_sets):
            raise ValueError("corpus.test_sets has an empty name: name files, folders, patterns or URLs")
        for each in test_sets:
            if hub_dataset_name(each) is not None:
                raise ValueError(
                    f"corpus.test_sets names {each}, of which no split can be chosen here: name the files of the "
                    "split, as hf://datasets/OWNER/NAME/PATH"
                )
        return tuple(without_secret("corpus.test_sets", each) for each in test_sets)

    @field_validator("source")
    @classmethod
    def _source_holds_no_secret(cls, source: str) -> str:
        if not source.strip():
            raise ValueError("corpus.source is empty: name a file, folder, pattern or URL")
        if (found := re.fullmatch(r"(.+)@([^@/]+)", source)) and hub_dataset_name(found[1]):
            raise ValueError(
                f"corpus.source is {source!r}: the revision of a dataset is a setting of its own. Set "
                f"corpus.source={found[1]} and corpus.revision={found[2]}"
            )
        return without_secret("corpus.source", source)

    def identity(self) -> dict[str, Any]:
        """Return the identity settings. Those that versions before did not have count only where they are set."""
        unset = [name for name in _OF_THE_HUB if getattr(self, name) is None]
        unset += [] if self.remove else ["remove", "test_sets"]
        return {name: value for name, value in super().identity().items() if name not in unset}

    def hub_text(self) -> HubText:
        """Return which text of a dataset of the Hub is read."""
        default = HubText()
        return HubText(self.config, self.hub_split or default.split, self.column or default.column)

    def split_identity(self) -> dict[str, Any]:
        """The settings that decide which document falls into which split."""
        return {"split": list(self.split), "split_seed": self.split_seed}

    @model_validator(mode="after")
    def _test_sets_have_a_use(self) -> Self:
        if self.test_sets and not self.remove:
            raise ValueError(
                "corpus.test_sets is set, but corpus.remove is empty, so nothing would be removed: set corpus.remove "
                "to contaminated"
            )
        return self

    @model_validator(mode="after")
    def _dataset_is_named(self) -> Self:
        chosen = [name for name in _OF_THE_HUB if getattr(self, name) is not None]
        if chosen and hub_dataset_name(self.source) is None:
            raise ValueError(
                f"corpus.{chosen[0]} is {getattr(self, chosen[0])!r}, but corpus.source {self.source!r} is not the "
                "name of a dataset of the Hugging Face Hub: set corpus.source=hf://OWNER/NAME, or leave "
                f"{' and '.join(f'corpus.{name}' for name in chosen)} out"
            )
        return self

    @model_validator(mode="after")
    def _split_is_whole(self) -> Self:
        if sum(self.split) != 1000 or min(self.split) < 0 or self.split[0] == 0 or self.split[1] == 0:
            raise ValueError(
                f"corpus.split is {self.split}: it must be three numbers that sum to 1000, the first two above zero"
            )
        return self


class TokenizerSpec(SpecPart):
    """Which vocabulary: an existing one, or one trained on the corpus."""

    path: str | None = Field(
        None,
        title="Path",
        description="An existing vocabulary: a spiece.model or a Hugging Face folder. null: one is trained on the"
        " training split, with the two settings below",
    )
    vocab_size: int = Field(
        32000,
        ge=300,
        le=250_000,
        title="Vocabulary",
        description="Pieces of the vocabulary to train, without the 100 sentinels <extra_id_N>",
    )
    character_coverage: float = Field(
        0.9995,
        ge=0.98,
        le=1.0,
        title="Character coverage",
        description="Share of the text's characters that get a piece of their own; the rest are unknown",
    )

    @field_validator("path")
    @classmethod
    def _path_is_expanded(cls, path: str | None) -> str | None:
        return None if path is None else str(at_home(path))

    def identity(self) -> dict[str, Any]:
        """Return the identity settings. A given vocabulary does not count here: the stage fingerprints its content."""
        return {"given": True} if self.path is not None else super().identity()


class ShardsSpec(SpecPart):
    """How token ids are cut into files."""

    execution = frozenset({"workers", "executor"})

    shard_tokens: int = Field(
        128 << 20,
        ge=4096,
        le=1 << 31,
        title="Tokens per shard",
        description="Tokens per file, about; a file ends at the end of a document",
    )
    workers: int | None = Field(
        None, ge=1, title="Workers", description="Processes that tokenize, on each machine. null: one per core"
    )
    executor: Literal["local", "dask"] = Field(
        "local",
        title="Executor",
        description="local: this machine tokenizes; dask: all hosts of the hostfile do, which have to share the root",
    )


class ObjectiveSpec(SpecPart):
    """T5 span corruption (Raffel et al. 2020, section 3.1.4)."""

    noise_density: float = Field(
        0.15, gt=0, lt=0.5, title="Noise density", description="Share of the tokens that are masked"
    )
    mean_span_tokens: float = Field(
        3.0, ge=1, le=20, title="Mean span", description="Mean length of a masked span, in tokens"
    )
    input_tokens: int = Field(
        512,
        ge=16,
        le=16384,
        title="Input tokens",
        description="Length of the encoder's input in tokens, EOS included; the decoder's length follows from it",
    )
