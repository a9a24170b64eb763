"""The data report has the numbers of the text, the vocabulary and the tokens."""

import numpy as np

from t5train.data.samples.loader import Samples
from t5train.data.shards import tokens_name
from t5train.data.vocabulary.sentencepiece_model import UNK_ID
from t5train.report.data_report import MOST_EPOCHS, data_lines, data_report
from t5train.report.data_statistics import SplitFacts, train_split_facts
from t5train.spec.recipes import recipe
from tests.support.generated_text import DataChain

SPEC = recipe("smoke").with_settings({"optimizer.num_steps": 50, "optimizer.warmup_steps": 5, "name": "mine"})


def test_the_facts_about_the_train_split_equal_what_its_files_hold(data_chain: DataChain) -> None:
    shards = data_chain.shards
    ids = [np.fromfile(shards.path / tokens_name("train", n), "<u2") for n in range(shards.counts["num_shards"])]
    facts = train_split_facts(shards, SPEC.objective)
    assert facts.unknown_pieces == sum(int((each == UNK_ID).sum()) for each in ids)
    assert facts.samples == Samples(shards, "train", SPEC.objective, seed=0).num_samples


def test_the_report_warns_of_many_unknown_pieces(data_chain: DataChain) -> None:
    shards, facts = data_chain.shards, train_split_facts(data_chain.shards, SPEC.objective)
    many = facts._replace(unknown_pieces=int(shards.counts["train_tokens"]) // 50)
    counts = {**shards.counts, "lacked_character_U+4E2D": 9}
    report = data_report(
        SPEC, data_chain.corpus, data_chain.tokenizer, shards.model_copy(update={"counts": counts}), many
    )
    assert "2.0% of the tokens of the training split are the unknown piece" in report
    assert "(U+4E2D) 9 times" in report
    assert "tokenizer.character" in report
    few = data_report(SPEC, data_chain.corpus, data_chain.tokenizer, shards, facts)
    assert "became the unknown piece." in few


def test_the_report_has_counts_epochs_and_digests(data_chain: DataChain) -> None:
    shards, facts = data_chain.shards, train_split_facts(data_chain.shards, SPEC.objective)
    report = data_report(SPEC, data_chain.corpus, data_chain.tokenizer, shards, facts)
    assert "| passages | 3,000 |" in report
    assert f"| text, in UTF-8 | {data_chain.corpus.counts['text_bytes']:,} bytes |" in report
    assert "| vocabulary, with sentinels | 400 pieces |" in report
    for split in ("train", "validation", "test"):
        passages, tokens = shards.counts[f"{split}_documents"], shards.counts[f"{split}_tokens"]
        assert f"| {split} | {passages:,} | {tokens:,} | {tokens / passages:.1f} |" in report
    compared = shards.counts["held_out_compared"]
    assert f"Hugging Face's tokenizer was compared on {compared:,} passages of the validation split" in report
    assert "Left out:" not in report
    epochs = 50 * SPEC.optimizer.global_batch_sequences / facts.samples
    assert f"The run makes {epochs:,.2f} epochs over the train split: 50 steps" in report
    for record in (data_chain.corpus, data_chain.tokenizer, shards):
        assert f"`{record.fingerprint[:12]}` | `{record.seal}` | `{record.path}` |" in report


def test_the_log_says_what_a_run_trains_on_and_warns_of_many_epochs(data_chain: DataChain) -> None:
    shards, facts = data_chain.shards, train_split_facts(data_chain.shards, SPEC.objective)
    tokens, epochs = data_lines(SPEC, shards, facts)
    assert f"{shards.counts['train_tokens']:,} in {shards.counts['train_documents']:,} passages (train)" in tokens
    assert epochs.startswith("The run makes ")
    steps = MOST_EPOCHS * facts.samples // SPEC.optimizer.global_batch_sequences + 1
    longer = SPEC.with_settings({"optimizer.num_steps": steps})
    assert data_lines(longer, shards, facts)[2].startswith("more than 64 epochs: the model may learn the text by heart")


def test_the_report_and_the_log_have_the_share_of_each_text_of_a_mixture(data_chain: DataChain) -> None:
    mixed = SPEC.with_settings({"corpus.mixed_with": "/data/own.txt", "objective.mixing_weights": [3, 1]})
    facts = SplitFacts(unknown_pieces=0, of_texts=[10_000, 500])
    report = data_report(mixed, data_chain.corpus, data_chain.tokenizer, data_chain.shards, facts)
    assert "Text from `pydocs`, `/data/own.txt`." in report
    assert "| `pydocs` | 10,000 | 75.00% | 0.24 |" in report
    assert "| `/data/own.txt` | 500 | 25.00% | 1.60 |" in report
    lines = data_lines(mixed, data_chain.shards, facts)
    assert "/data/own.txt: 25.00% of training, 1.60 epochs over its 500 samples" in lines
