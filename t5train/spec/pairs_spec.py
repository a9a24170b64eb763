"""Settings of fine-tuning: the pairs of source and target that a model is trained on.

Files of pairs are named as ``LOCATION#key=value&key=value``: after ``#`` follow the columns, the prefix and the task.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote_to_bytes

from pydantic import Field, field_validator

from t5train.errors import encodable
from t5train.records.locations import hub_dataset_name, local_folder, redacted, without_secret
from t5train.spec.data_spec import HUB_SPLIT, dataset_at_revision, require_whole_split
from t5train.spec.settings import check, nearest
from t5train.spec.training_spec import MixingLimit, MixingSpec, MixingTemperature, MixingWeights

GENERATED = {"reverse_digits": "reverse: ", "sort_digits": "sort: "}
"""The prefixes of pairs that are made on this machine, by their names."""
TASK_NAME = r"^\w[\w .+-]{0,63}$"
_COLUMNS, _NAMES = ("source", "target"), ("prefix", "task")
_OF_THE_HUB = ("config", "split", "revision")
_CHOICES = re.compile(r"#(?=[A-Za-z_]*=)")
_TRAIN: Literal["train"] = "train"
HeldOut = Literal["validation", "test"]


class RowLengths(NamedTuple):
    """The lengths of a row of a batch in tokens, EOS included: of the encoder's input, and of the decoder's target."""

    input_tokens: int
    target_tokens: int


class PairSource(NamedTuple):
    """The pairs of a task: where they are, the columns that hold them, and what the model is told to do with them."""

    location: str
    """A path, pattern or URL, ``hf://OWNER/NAME``, or one of ``GENERATED``."""
    task: str
    prefix: str = ""
    """Stands before each source."""
    source: str = "source"
    """A column, or the path of a nested one, such as ``translation.en``."""
    target: str = "target"
    config: str | None = None
    """Configuration of the dataset of the Hub. None: its only or default one."""
    split: str = "train"
    """Split of the dataset of the Hub."""
    revision: str = ""
    """Commit, tag or branch of the dataset of the Hub. Empty: that of main at the first download."""


class PairsSpec(MixingSpec):
    """Pairs to fine-tune on: where they are, how they are split, and the rows that they are packed into."""

    part = "pairs"

    train: tuple[str, ...] = Field(
        (),
        description="Files of pairs to train on, one for each task: a path, pattern, URL or hf://OWNER/NAME, and after "
        "# what they hold, such as wmt.jsonl#source=translation.en&target=translation.ro&prefix=translate English to "
        "Romanian: &task=en-ro. Empty: the run pre-trains on text",
    )
    validation: tuple[str, ...] = Field(
        (),
        description="Files of pairs to validate on, named as train is and in its order; columns and prefix are by "
        "default those of the task. Empty: a share of train (split)",
    )
    test: tuple[str, ...] = Field(
        (), description="Files of pairs to test on, named as validation is. Empty: a share of train (split)"
    )
    split: tuple[int, int, int] = Field(
        (950, 30, 20),
        description="Shares of the pairs for training, validation and test, in thousandths. Pairs with the same source "
        "fall into the same split. The share of a split that has files of its own is trained on",
    )
    split_seed: int = Field(0, ge=0, description="Decides which source falls into which split")
    remove: Literal["none", "contaminated"] = Field(
        "none",
        description="Pairs to remove from train. contaminated: those whose source is in the task's files of validation "
        "or test, and those held out of a task that reads the same file with source and target swapped",
    )
    input_tokens: int = Field(256, ge=8, le=16384, description="Length of a row of sources in tokens, EOS included")
    target_tokens: int = Field(256, ge=4, le=16384, description="Length of a row of targets in tokens, EOS included")
    too_long: Literal["cut", "drop", "refuse"] = Field(
        "cut",
        description="What becomes of a pair that is longer than a row. cut: it is shortened, and still ends in EOS",
    )
    pack: bool = Field(True, description="Put several pairs into a row, which do not see each other")
    mixing_temperature: MixingTemperature = Field(
        1.0,
        description="With several tasks: they are trained on in proportion to min(pairs, mixing_limit)^(1/T). 1: by "
        "size; more: small tasks more often. Not with mixing_weights",
    )
    mixing_limit: MixingLimit = Field(
        None,
        description="With several tasks: largest number of pairs that counts as the size of a task. null: no limit. "
        "Not with mixing_weights",
    )
    mixing_weights: MixingWeights = Field(
        None,
        description="With several tasks: weights of the tasks in the order of train, such as 0.7,0.3. Only their "
        "ratios count. null: by size",
    )

    @field_validator("train", "validation", "test", mode="before")
    @classmethod
    def _one_file_needs_no_list(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given  # names may have commas

    def tasks(self) -> list[PairSource]:
        """Return the pairs to train on, one item for each task."""
        return [_pair_source("pairs.train", each, _TRAIN) for each in self.train]

    def shares(self) -> tuple[int, int, int]:
        """Return each split's share of the sources in ``train``, in thousandths; none if it has files of its own."""
        _, validation, test = self.split
        validation, test = (0 if self.validation else validation), (0 if self.test else test)
        return 1000 - validation - test, validation, test

    def held_out(self, split: HeldOut) -> list[PairSource]:
        """Return the pairs of a split that has files of its own, in the order of ``tasks``; empty if it has none."""
        setting, tasks, named = f"pairs.{split}", self.tasks(), getattr(self, split)
        found = dict[str, PairSource]()
        for each, default in zip(named, [*tasks, *[None] * len(named)], strict=False):
            source = _pair_source(setting, each, split, default, {task.task: task for task in tasks})
            if source.task in found:
                raise ValueError(f"{setting} names the task {source.task!r} more than once: name each task once")
            found[source.task] = source
        if named and (missing := [task.task for task in tasks if task.task not in found]):
            raise ValueError(
                f"{setting} has no pairs of the task {missing[0]!r}: name files for each task of pairs.train, or leave "
                f"{setting} out"
            )
        return [found[task.task] for task in tasks] if named else []

    @check
    def _files_can_be_named(self) -> None:
        names = [task.task for task in self.tasks()]
        for each in names:
            if names.count(each) > 1:
                raise ValueError(
                    f"pairs.train names the task {each!r} more than once: name them apart with #task=NAME, or name all "
                    "files of a task with a pattern"
                )
        if self.train:
            self.held_out("validation")
            self.held_out("test")

    @check
    def _settings_have_a_use(self) -> None:
        given = [name for name in ("validation", "test") if getattr(self, name)]
        given += [name for name in self.identity() if name.startswith("mixing_")]
        if given and not self.train:
            raise ValueError(f"pairs.{given[0]} is set, but pairs.train is empty: name the pairs to train on")
        if self.remove != "none" and not (self.validation or self.test) and len(self.train) == 1:
            raise ValueError(
                f"pairs.remove is {self.remove}, but neither pairs.validation nor pairs.test is set, and pairs of one "
                "source never fall into two splits of a task: leave it out"
            )

    @check
    def _rates_are_of_a_mixture(self) -> None:
        self.require_mixture(max(1, len(self.train)), "task", "in pairs.train", "pairs.train")

    @check
    def _split_is_whole(self) -> None:
        require_whole_split("pairs.split", self.split)


def location_of(named: str) -> str:
    """Return the location in a name of files of pairs, without what is chosen after ``#``."""
    return _CHOICES.split(named, maxsplit=1)[0]


def _pair_source(
    setting: str,
    named: str,
    split: str,
    default: PairSource | None = None,
    tasks: Mapping[str, PairSource] | None = None,
) -> PairSource:
    """Return what one of the names of a setting says. Raises ValueError if it says what there is not.

    Those of held-out pairs belong to one of ``tasks``, which is ``default`` if they do not name another.
    """
    location, *choices = _CHOICES.split(named, maxsplit=1)
    if not location.strip():
        raise ValueError(f"{setting} has an empty name: name a file, folder, pattern or URL")
    if encodable(named) != named:
        raise ValueError(
            f"{setting} names {encodable(named)}, which is not UTF-8: rename the file, or correct this text"
        )
    without_secret(setting, location)
    if found := dataset_at_revision(location):
        raise ValueError(f"{setting} names {named!r}: write the revision as {found[1]}#revision={found[2]}")
    named = _shown(named, location)
    given = _given(setting, named, location, choices[0] if choices else "")
    if tasks is None:
        values = {"task": _default_task(location), "prefix": GENERATED.get(location, "")}
    else:
        values = _task_of(setting, named, given, default, tasks)
    if hub_dataset_name(location) is not None:
        values |= {"split": split}
    source = PairSource(location, **{**values, **given})
    if source.source == source.target:
        raise ValueError(
            f"{setting} names {named!r}: {source.source!r} is the column of both source and target, so the model would "
            "learn to copy. Choose two columns (#source=NAME&target=NAME)"
        )
    if not re.fullmatch(HUB_SPLIT, source.split):
        raise ValueError(f"{setting} names {named!r}: {source.split!r} cannot be the name of a split")
    if not re.fullmatch(TASK_NAME, source.task):
        raise ValueError(
            f"{setting} names the task {source.task!r}: it must be at most 64 letters, digits and . + - _ or spaces. "
            "Name it with #task=NAME"
        )
    return source


def _given(setting: str, named: str, location: str, choices: str) -> dict[str, str]:
    """Return what is chosen after ``#``."""
    allowed: Sequence[str] = (*_COLUMNS, *_NAMES)
    if location in GENERATED:
        allowed = _NAMES
    elif hub_dataset_name(location) is not None:
        allowed = (*allowed, *_OF_THE_HUB)
    given = dict[str, str]()
    for name, is_pair, value in (each.partition("=") for each in (choices.split("&") if choices else [])):
        if not is_pair:
            raise ValueError(
                f"{setting} names {named!r}: after #, {name!r} is not KEY=VALUE. Write & inside of a value as %26"
            )
        if name in _OF_THE_HUB and name not in allowed:
            raise ValueError(f"{setting} names {named!r}: {name} can be chosen of a dataset hf://OWNER/NAME only")
        if name not in allowed:
            raise ValueError(
                f"{setting} names {named!r}: after #, {', '.join(allowed)} can be chosen, but not "
                f"{name!r}{nearest(name, list(allowed))}"
            )
        if name in given or (not value and name != "prefix"):
            raise ValueError(f"{setting} names {named!r}: give {name} once, and a value of it")
        given[name] = _decoded(setting, named, value)
    return given


def _shown(named: str, location: str) -> str:
    """Return a name for errors. What follows the # of a URL may be a secret of its server."""
    is_url = local_folder(location) is None and hub_dataset_name(location) is None
    return redacted(location) if is_url else named


def _decoded(setting: str, named: str, value: str) -> str:
    """Return a value with what %XX stands for."""
    try:
        return unquote_to_bytes(value).decode()
    except UnicodeDecodeError:
        raise ValueError(
            f"{setting} names {named!r}: %XX in {value!r} stands for bytes that are not UTF-8. Write % inside of a "
            "value as %25"
        ) from None


def _task_of(
    setting: str, named: str, given: Mapping[str, str], default: PairSource | None, tasks: Mapping[str, PairSource]
) -> dict[str, str]:
    """Return the task, prefix and columns of held-out pairs."""
    name = given.get("task") or (default.task if default else "")
    if name not in tasks:
        raise ValueError(
            f"{setting} names {named!r}, but pairs.train has the tasks {', '.join(tasks)}: name one of them with "
            f"#task=NAME{nearest(name, list(tasks))}"
        )
    task = tasks[name]
    if given.get("prefix", task.prefix) != task.prefix:
        raise ValueError(
            f"{setting} names {named!r}, but the prefix of the task {name!r} is {task.prefix!r} in pairs.train: leave "
            "it out, or give the same"
        )
    return {"task": name, "prefix": task.prefix, "source": task.source, "target": task.target}


def _default_task(location: str) -> str:
    """Return the name of a task: the stem of its file, or the name of its folder or dataset."""
    parts = [each for each in PurePosixPath(location).parts if not any(magic in each for magic in "*?[")]
    stem = PurePosixPath(parts[-1]).name.partition(".")[0] if parts else ""
    return re.sub(r"[^\w.+-]+", "-", stem).strip(".-")[:64] or "pairs"
