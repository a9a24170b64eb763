"""Samples are shown as they are trained on: with their spans put in, they give the text of their window."""

import re

import numpy as np
import pytest

from t5train.data.loader import Samples, Windows
from t5train.data.span_corruption import geometry
from t5train.data.tokenizer import Tokenizer
from t5train.report.data_samples import shown, shown_samples
from t5train.spec.recipes import recipe
from tests.support.generated_text import DataChain

SPEC = recipe("smoke")
SENTINEL = re.compile(r"<extra_id_(\d+)>")


@pytest.mark.parametrize("split", ["train", "validation"])
def test_samples_are_those_that_a_run_uses(data_chain: DataChain, split: str) -> None:
    of_run = Samples(data_chain.shards, split, SPEC.objective, SPEC.optimizer.seed)
    batch = of_run.batch(5, 3)
    found = list(shown_samples(SPEC, data_chain.tokenizer, data_chain.shards, split, start=5, count=3))
    assert [each.sample_id for each in found] == batch.sample_ids.tolist()
    assert [each.input_ids for each in found] == batch.inputs.tolist()
    assert [each.target_ids for each in found] == batch.targets.tolist()


def test_the_spans_put_into_the_input_give_the_window(data_chain: DataChain) -> None:
    vocabulary = Tokenizer.load(data_chain.tokenizer.path)
    windows = Windows(data_chain.shards, "train", geometry(SPEC.objective).window_tokens)
    for sample in shown_samples(SPEC, data_chain.tokenizer, data_chain.shards, "train", start=0, count=20):
        spans = SENTINEL.split(sample.targets.removesuffix(" </s>"))[1:]
        whole = sample.inputs.removesuffix(" </s>")
        for number, span in zip(spans[::2], spans[1::2], strict=True):
            whole = whole.replace(f"<extra_id_{number}>", span)
        window = windows[np.array([sample.sample_id])][0]
        assert "".join(whole.split()) == "".join(shown(vocabulary, window).split())


def test_special_ids_have_names(data_chain: DataChain) -> None:
    vocabulary = Tokenizer.load(data_chain.tokenizer.path)
    (ids,) = vocabulary.encode(["badine el \u4e2d"], add_eos=True)
    text = shown(vocabulary, np.append(ids, [vocabulary.pad_id, vocabulary.sentinel_ids[7]]))
    assert text == "badine el <unk> </s> <pad> <extra_id_7>"
