"""Settings of a text that is a dataset of the Hugging Face Hub: when they are allowed, and what they change."""

import pytest

from t5train.errors import SpecError
from t5train.records.locations import hub_dataset_name
from t5train.spec.data_spec import HubText
from t5train.spec.recipes import smoke

NAME = "hf://allenai/c4"


@pytest.mark.parametrize("name", [NAME, "hf://allenai/c4/"])
def test_owner_and_name_name_a_dataset(name: str) -> None:
    assert hub_dataset_name(name) == "allenai/c4"


@pytest.mark.parametrize(
    "source",
    ["hf://datasets/allenai/c4", "hf://datasets/allenai/c4/en/*.json.gz", "hf://c4", "hf://allenai/c4/en", "hf://datasets/c4",
     "hf://spaces/one", "allenai/c4", "/data/c4", "s3://allenai/c4", "hf://allenai/c*", "wiki_dpr"],
)  # fmt: skip
def test_paths_patterns_and_other_stores_name_no_dataset(source: str) -> None:
    assert hub_dataset_name(source) is None


@pytest.mark.parametrize(
    ("setting", "value"), [("corpus.config", "en"), ("corpus.hub_split", "test"), ("corpus.column", "body")]
)
@pytest.mark.parametrize("source", ["text.jsonl", "hf://datasets/allenai/c4/en/*.json.gz", "wiki_dpr", "pydocs"])
def test_settings_of_a_dataset_are_refused_for_other_texts(setting: str, value: str, source: str) -> None:
    said = rf"{setting} is '{value}', but corpus.source .* is not the name of a dataset .*: set corpus.source=hf://"
    with pytest.raises(SpecError, match=said):
        smoke().with_settings({"corpus.source": source, setting: value})


def test_a_revision_in_the_name_is_refused_with_the_settings_to_use() -> None:
    said = f"Set corpus.source={NAME} and corpus.revision=v2"
    with pytest.raises(SpecError, match=said):
        smoke().with_settings({"corpus.source": f"{NAME}@v2"})
    assert smoke().with_settings({"corpus.source": "hf://datasets/allenai/c4@v2/en/a.txt"})


def test_a_slice_is_no_split() -> None:
    with pytest.raises(SpecError, match=r"corpus.hub_split is 'train\[:1%\]'"):
        smoke().with_settings({"corpus.source": NAME, "corpus.hub_split": "train[:1%]"})


def test_unset_settings_have_defaults_and_are_no_part_of_the_identity() -> None:
    spec = smoke().with_settings({"corpus.source": NAME})
    assert spec.corpus.hub_text() == HubText(None, "train", "text")
    assert not {"config", "hub_split", "column"} & set(spec.corpus.identity())
    chosen = spec.with_settings({"corpus.column": "body", "corpus.hub_split": "test", "corpus.config": "en"})
    assert chosen.corpus.hub_text() == HubText("en", "test", "body")
    assert chosen.corpus.identity().items() >= {"config": "en", "hub_split": "test", "column": "body"}.items()
