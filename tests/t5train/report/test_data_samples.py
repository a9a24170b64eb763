"""Samples are shown as they are trained on: with their spans put in, they give the text of their window."""

import re

import numpy as np
import pytest

from t5train.data.samples.loader import Samples, Windows
from t5train.data.samples.span_corruption import geometry
from t5train.data.vocabulary.tokenizer import Tokenizer
from t5train.errors import InputError
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


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_start_beyond_the_last_sample_is_refused_with_how_many_there_are(data_chain: DataChain, split: str) -> None:
    spec = SPEC.with_settings({"optimizer.num_steps": "1", "optimizer.warmup_steps": "0"})
    samples = Samples(data_chain.shards, split, SPEC.objective, SPEC.optimizer.seed).num_samples
    message = (
        rf"^--start is {samples:,}, but the {split} split has {samples:,} samples\. Positions are 0 to {samples - 1:,}$"
    )
    with pytest.raises(InputError, match=message):
        list(shown_samples(spec, data_chain.tokenizer, data_chain.shards, split, samples, count=1))
    last = shown_samples(spec, data_chain.tokenizer, data_chain.shards, split, samples - 1, count=3)
    assert len(list(last)) == 1, "no sample is shown twice"


def test_samples_of_later_epochs_of_the_run_are_shown_until_its_end(data_chain: DataChain) -> None:
    samples = Samples(data_chain.shards, "train", SPEC.objective, SPEC.optimizer.seed).num_samples
    spec = SPEC.with_settings({"optimizer.num_steps": str(samples)})
    end = samples * SPEC.optimizer.global_batch_sequences
    assert len(list(shown_samples(spec, data_chain.tokenizer, data_chain.shards, "train", end - 1, count=3))) == 1
    with pytest.raises(
        InputError, match=rf"samples and the run takes {end:,}, in several epochs\. Positions are 0 to "
    ):
        list(shown_samples(spec, data_chain.tokenizer, data_chain.shards, "train", end, count=1))


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
