"""Settings of the text, the tokenizer and the token shards."""

import re
from typing import Annotated, Any, Literal, NamedTuple, get_args
from urllib.parse import unquote

from pydantic import Field, field_validator

from t5train.records.locations import at_home, hub_dataset_name, without_secret
from t5train.spec.known_texts import BUILT_IN, is_named_text
from t5train.spec.settings import SpecPart, check

NUM_SENTINELS = 100

Repetition = Literal["duplicates", "near_duplicates", "contaminated"]
"""What training text can repeat; ``t5train.data.checks.repetitions`` defines each."""
REPETITIONS: tuple[Repetition, ...] = get_args(Repetition)
_OF_THE_HUB = ("config", "hub_split", "column")
HUB_SPLIT = r"^\w+([.-]\w+)*$"
_LANGUAGE, _LANGUAGES = "^[a-z]{2,3}(-[A-Za-z0-9]{2,8})*$", "language codes such as en or en-US"


class HubText(NamedTuple):
    """Which text of a dataset of the Hugging Face Hub is read."""

    config: str | None = None
    """None: its only or default configuration."""
    split: str = "train"
    column: str = "text"


class TextSource(NamedTuple):
    """One of the texts that a corpus is made of: a path, pattern, URL or name, and which state of it."""

    source: str
    revision: str
    hub_text: HubText


class CorpusSpec(SpecPart):
    """The text, and how it is split."""

    # Licence and languages are statements about the text: they change no weight.
    execution = frozenset({"workers", "license", "languages"})

    source: str = Field(
        BUILT_IN,
        description="Text to train on: a file, folder, glob pattern or fsspec URL; hf://OWNER/NAME, a dataset of "
        "the Hugging Face Hub; psgs_w100 or wiki_dpr, DPR's passages of Wikipedia; or pydocs, Python's "
        "own documentation",
    )
    revision: str = Field(
        "",
        description="Your name for this state of the text: change it when the text at the same place has changed. "
        "For datasets of the Hub: a commit, tag or branch; empty: that of main at the first download",
    )
    config: str | None = Field(
        None,
        min_length=1,
        description="Configuration of the dataset hf://OWNER/NAME. null: its only or default one",
    )
    hub_split: str | None = Field(
        None,
        pattern=HUB_SPLIT,
        description="Split of the dataset hf://OWNER/NAME to take the text from. null: train",
    )
    column: str | None = Field(
        None,
        min_length=1,
        description="Column of the dataset hf://OWNER/NAME that holds the text. null: text",
    )
    mixed_with: tuple[str, ...] = Field(
        (),
        description="More texts to train on, named as source is, or "
        "hf://OWNER/NAME#config=en&split=train&column=text&revision=v2. objective.mixing_* decide how "
        "much of each is trained on",
    )
    split: tuple[int, int, int] = Field(
        (950, 30, 20),
        description="Shares of the documents for training, validation and test, in thousandths",
    )
    split_seed: int = Field(0, ge=0, description="Decides which document falls into which split")
    remove: tuple[Repetition, ...] = Field(
        (),
        description="Passages to remove from training: duplicates have the text of another passage, near_duplicates "
        "most of its runs of 5 words; contaminated share 13 words in a row with validation, test or "
        "test_sets",
    )
    test_sets: tuple[str, ...] = Field(
        (),
        description="Other texts, such as benchmarks, that training is kept free of, as remove says",
    )
    remove_listed: str | None = Field(
        None,
        min_length=1,
        description="File of near-duplicates that `t5-pretrain data index duplicates` wrote for this text, to "
        "remove from training. null: none",
    )
    license: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9 .,+()/_-]{0,99}$",
        description="Licence of the text or pairs, for the model card, such as cc-by-sa-4.0. null: none is stated",
    )
    languages: tuple[Annotated[str, Field(pattern=_LANGUAGE, description=_LANGUAGES)], ...] = Field(
        (), description="Codes of the languages of the text or pairs, for the model card, such as en,de"
    )
    workers: int | None = Field(None, ge=1, description="Processes that read the text. null: one per core")

    @field_validator("languages", "remove", mode="before")
    @classmethod
    def _a_list_may_be_one_text(cls, given: Any) -> Any:
        return [each.strip() for each in given.split(",")] if isinstance(given, str) else given

    @field_validator("remove_listed")
    @classmethod
    def _path_is_expanded(cls, path: str | None) -> str | None:
        return None if path is None else str(at_home(path))

    @field_validator("test_sets", "mixed_with", mode="before")
    @classmethod
    def _one_text_needs_no_list(cls, given: Any) -> Any:
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

    @field_validator("mixed_with")
    @classmethod
    def _mixed_texts_can_be_named(cls, mixed_with: tuple[str, ...]) -> tuple[str, ...]:
        for each in mixed_with:
            if not each.strip():
                raise ValueError("corpus.mixed_with has an empty name: name files, folders, patterns or URLs")
            _mixed_text(each, "")
        return tuple(without_secret("corpus.mixed_with", each) for each in mixed_with)

    @field_validator("source")
    @classmethod
    def _source_holds_no_secret(cls, source: str) -> str:
        if not source.strip():
            raise ValueError("corpus.source is empty: name a file, folder, pattern or URL")
        if found := dataset_at_revision(source):
            raise ValueError(
                f"corpus.source is {source!r}: the revision of a dataset is a setting of its own. Set "
                f"corpus.source={found[1]} and corpus.revision={found[2]}"
            )
        if "#" in source and hub_dataset_name(source.partition("#")[0]):
            raise ValueError(
                f"corpus.source is {source!r}: of this text, what is chosen are settings of their own. Set "
                f"corpus.source={source.partition('#')[0]}, and corpus.config, hub_split, column or revision"
            )
        return without_secret("corpus.source", source)

    @property
    def removes_passages(self) -> bool:
        """Whether passages are removed from training."""
        return bool(self.remove) or self.remove_listed is not None

    def identity(self) -> dict[str, Any]:
        """Return the identity settings. Those that versions before did not have count only where they are set.

        Of ``remove_listed``, only that it is set counts here: the stage fingerprints the content of the file.
        """
        unset = [name for name in (*_OF_THE_HUB, "remove_listed") if getattr(self, name) is None]
        unset += [] if self.remove else ["remove", "test_sets"]
        unset += [] if self.mixed_with else ["mixed_with"]
        values = super().identity() | {"remove_listed": True}
        return {name: value for name, value in values.items() if name not in unset}

    def hub_text(self) -> HubText:
        """Return which text of a dataset of the Hub is read."""
        default = HubText()
        return HubText(self.config, self.hub_split or default.split, self.column or default.column)

    def named(self) -> list[str]:
        """Return the texts as they are named: ``source``, then ``mixed_with``."""
        return [self.source, *self.mixed_with]

    def texts(self) -> list[TextSource]:
        """Return the texts that the corpus is made of: ``source``, then those of ``mixed_with``."""
        first = TextSource(self.source, self.revision, self.hub_text())
        return [first, *(_mixed_text(each, self.revision) for each in self.mixed_with)]

    def split_identity(self) -> dict[str, Any]:
        """The settings that decide which document falls into which split."""
        return {"split": list(self.split), "split_seed": self.split_seed}

    @check
    def _test_sets_have_a_use(self) -> None:
        if self.test_sets and not self.remove:
            raise ValueError(
                "corpus.test_sets is set, but corpus.remove is empty, so nothing would be removed: set corpus.remove "
                "to contaminated"
            )

    @check
    def _texts_differ(self) -> None:
        for each in self.mixed_with:
            if self.named().count(each) > 1:
                raise ValueError(
                    f"corpus.source and corpus.mixed_with name {each!r} more than once: name each text once, and set "
                    "objective.mixing_weights to train on more of it"
                )

    @check
    def _pairs_are_of_one_text(self) -> None:
        if self.remove_listed is not None and self.mixed_with:
            raise ValueError(
                f"corpus.remove_listed is {self.remove_listed!r}, but its pairs are of one text, and corpus.mixed_with "
                "names more: leave one of the two out"
            )

    @check
    def _dataset_is_named(self) -> None:
        chosen = [name for name in _OF_THE_HUB if getattr(self, name) is not None]
        if chosen and hub_dataset_name(self.source) is None:
            raise ValueError(
                f"corpus.{chosen[0]} is {getattr(self, chosen[0])!r}, but corpus.source {self.source!r} is not the "
                "name of a dataset of the Hugging Face Hub: set corpus.source=hf://OWNER/NAME, or leave "
                f"{' and '.join(f'corpus.{name}' for name in chosen)} out"
            )

    @check
    def _split_is_whole(self) -> None:
        require_whole_split("corpus.split", self.split)


def require_whole_split(setting: str, split: tuple[int, int, int]) -> None:
    """Raise ValueError unless shares of training, validation and test are thousandths of a whole."""
    if sum(split) != 1000 or min(split) < 0 or split[0] == 0 or split[1] == 0:
        raise ValueError(f"{setting} is {split}: it must be three numbers that sum to 1000, the first two above zero")


def dataset_at_revision(source: str) -> re.Match[str] | None:
    """Return dataset and revision, as groups 1 and 2, of a source that other tools would take: hf://OWNER/NAME@v2."""
    found = re.fullmatch(r"(.+)@([^@/#]+)", source)
    return found if found and hub_dataset_name(found[1]) else None


def _mixed_text(named: str, revision: str) -> TextSource:
    """Return one of corpus.mixed_with. Raises ValueError for a choice that there is not."""
    source, has_choices, choices = named.partition("#")
    if found := dataset_at_revision(source):
        raise ValueError(f"corpus.mixed_with names {named!r}: write the revision as {found[1]}#revision={found[2]}")
    allowed: tuple[str, ...] = ()
    if hub_dataset_name(source) is not None:
        allowed = ("config", "split", "column", "revision")
    elif is_named_text(source) and source != BUILT_IN:
        allowed = ("revision",)
    if not allowed:
        return TextSource(named, "" if named == BUILT_IN or named.startswith("hf://") else revision, HubText())
    pairs = [each.partition("=") for each in choices.split("&")] if has_choices else []
    given = {name: unquote(value) for name, _, value in pairs}
    is_split = re.fullmatch(HUB_SPLIT, given.get("split", HubText().split))
    if len(given) < len(pairs) or not given.keys() <= set(allowed) or not all(given.values()) or not is_split:
        raise ValueError(
            f"corpus.mixed_with names {named!r}: after #, {', '.join(allowed)} can be chosen, each once, such as "
            f"{source}#{allowed[0]}=NAME"
        )
    default = HubText()
    text = HubText(given.get("config"), given.get("split", default.split), given.get("column", default.column))
    return TextSource(source, given.get("revision", ""), text)


class TokenizerSpec(SpecPart):
    """Which vocabulary: an existing one, or one trained on the text or the pairs."""

    path: str | None = Field(
        None,
        description="An existing vocabulary: a spiece.model or a Hugging Face folder. null: one is trained, or it is "
        "that of model.start_from for runs on pairs, and for models on the Hub or in a bucket",
    )
    vocab_size: int = Field(
        32000,
        ge=16,
        le=250_000,
        description="Pieces of the vocabulary to train, without the 100 sentinels",
    )
    character_coverage: float = Field(
        0.9995,
        ge=0.98,
        le=1.0,
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

    execution = frozenset({"workers", "executor", "max_unknown_share"})

    shard_tokens: int = Field(128 << 20, ge=4096, le=1 << 31, description="Tokens per file, about")
    workers: int | None = Field(None, ge=1, description="Processes that tokenize, on each machine. null: one per core")
    executor: Literal["local", "dask"] = Field(
        "local",
        description="local: this machine tokenizes; dask: all hosts do, if they share the root and the text",
    )
    max_unknown_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Largest share of unknown pieces in the tokens to train on; more than 0.01 is a warning",
    )
