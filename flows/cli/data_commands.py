"""``data show``, ``stats``, ``check`` and ``pairs``: what a run trains on. The first two make missing token shards.

``data index`` is in ``index_commands``.
"""

import json
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import typer

from flows.cli.options import (
    Chosen,
    ConfigOption,
    JsonOption,
    PlotOption,
    RootOption,
    SetOption,
    TextOptions,
    chosen,
    require_writable_names,
    settings,
    with_options,
    write_plot,
)
from flows.cli.terminal import complain, say, show_table, stage_display
from flows.spec_from_recipe import require_on_text, require_recipe_for
from infra.head.preflight.pair_checks import require_pairs
from infra.head.preflight.remote_starts import with_start_here
from infra.head.preflight.text_checks import require_sources, require_text
from infra.head.tokenising.hosts_executor import shard_workers
from t5train.data.checks.whole_reading import TEXT_FINDINGS, TextFindings
from t5train.data.corpus import build_corpus, check_text
from t5train.data.pairs.pairs import build_pairs
from t5train.data.pairs.pairs_tokenizer import build_pairs_tokenizer
from t5train.data.passages import Split
from t5train.data.shards import build_shards
from t5train.data.vocabulary.sentencepiece_model import most_pieces
from t5train.data.vocabulary.tokenizer import build_tokenizer
from t5train.errors import SpecError
from t5train.quantities import quantity
from t5train.records.stage_records import Corpus, TokenizerFiles, TokenShards
from t5train.report.data_report import data_lines
from t5train.report.data_samples import shown_samples
from t5train.report.data_statistics import (
    QUANTILE_NAMES,
    SPLIT_NAMES,
    data_plot,
    data_statistics,
    findings_plot,
    length_rows,
    repetition_lines,
    repetition_rows,
    size_rows,
    train_split_facts,
    word_lines,
)
from t5train.report.pairs_report import pairs_report
from t5train.spec import RunSpec
from t5train.spec.data_spec import REPETITIONS


class _Data(NamedTuple):
    corpus: Corpus
    tokenizer: TokenizerFiles
    shards: TokenShards


@with_options
def show(
    choice: TextOptions,
    split: Annotated[Split, typer.Option(help="train, validation or test")] = "train",
    start: Annotated[int, typer.Option(min=0, help="Position of the first sample in the run's order")] = 0,
    count: Annotated[int, typer.Option(min=1, max=1000, help="Number of samples")] = 3,
    ids: Annotated[bool, typer.Option("--ids", help="Show token ids, too")] = False,
) -> None:
    """Show samples with their masked spans: the inputs of the model, and the targets that it is to predict."""
    spec = _of_text(choice)
    made = _made(spec)
    for sample in shown_samples(spec, made.tokenizer, made.shards, split, start, count):
        say(f"sample {sample.sample_id:,} of the {split} split")
        say(f"inputs ({len(sample.input_ids)} tokens): {sample.inputs}")
        say(f"targets ({len(sample.target_ids)} tokens): {sample.targets}")
        if ids:
            say(f"input ids: {' '.join(map(str, sample.input_ids))}")
            say(f"target ids: {' '.join(map(str, sample.target_ids))}")
        say("")


@with_options
def stats(
    choice: TextOptions,
    plot: PlotOption = None,
) -> None:
    """Show the number and lengths of passages in each split, pieces per word, and what the vocabulary lacks."""
    spec = _of_text(choice)
    require_writable_names(plot=plot)
    made = _made(spec)
    statistics = data_statistics(made.corpus, made.tokenizer, made.shards, spec.objective)
    show_table(["split", "passages", "tokens", *QUANTILE_NAMES], length_rows(statistics))
    for line in [
        *word_lines(statistics),
        *data_lines(spec, made.shards, train_split_facts(made.shards, spec.objective)),
    ]:
        say(line)
    write_plot(plot, lambda: data_plot(statistics, spec.objective))
    if plot is not None:
        say(f"plot: {plot}")


@dataclass(frozen=True)
class _PairsFileOptions:
    """The options that choose pairs to look at, and what differs from the recipe finetune_base."""

    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE",
            help="Pairs of a task: path, pattern or URL, and columns, such as 'wmt.jsonl#source=en&target=de'; can be "
            "repeated",
            show_default="those of --config",
        ),
    ] = None
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="RECIPE",
            help="Recipe to start from",
            show_default="finetune_base",
        ),
    ] = None
    vocabulary: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH",
            help="A spiece.model or a Hugging Face folder (tokenizer.path)",
            show_default="that of model.start_from, or trained on the pairs",
        ),
    ] = None
    config: ConfigOption = None
    changes: SetOption = None
    root: RootOption = None

    def chosen(self) -> Chosen:
        """Return what these options choose; see ``chosen``."""
        of_file = {} if not self.files else {"pairs.train": json.dumps(self.files)}
        of_vocabulary = {} if self.vocabulary is None else {"tokenizer.path": json.dumps(self.vocabulary)}
        changed = settings(self.changes) | of_file | of_vocabulary
        return chosen(self.recipe, self.config, changed, root=self.root, default="finetune_base")


@with_options
def pairs(choice: _PairsFileOptions) -> None:
    """Show how many pairs there are, their lengths, what is cut, the best rows, and pairs as the model sees them.

    $ t5-pretrain data pairs 'wmt.jsonl#source=en&target=de' --set model.start_from=T5_MODEL
    """
    selected = choice.chosen()
    spec = with_start_here(selected.spec())
    require_recipe_for(True, spec.recipe)
    require_pairs(spec)
    root = spec.storage.root
    with stage_display() as progress:
        made = build_pairs(spec.pairs, root, progress)
        try:
            tokenizer = build_pairs_tokenizer(spec.tokenizer, made, root, progress)
        except SpecError as error:
            if "tokenizer.vocab_size" in selected.named or (most := most_pieces(error)) is None:
                raise
            smaller = spec.with_settings({"tokenizer.vocab_size": most}).tokenizer
            tokenizer = build_pairs_tokenizer(smaller, made, root, progress)
    say(pairs_report(made, tokenizer, spec.pairs).removesuffix("\n"))
    if spec.tokenizer.path is None:
        say(
            f"\nTokens are those of a vocabulary of {tokenizer.counts['pieces']:,} pieces that was trained on these "
            "pairs. Name that of your model with --tokenizer T5_MODEL."
        )
    complain(f"pairs: {made.path}")


@with_options
def check(
    choice: TextOptions,
    test_set: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to compare training with, such as a benchmark's test set, besides corpus.test_sets: a path or "
            "URL. Can be repeated",
            metavar="SOURCE",
        ),
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Look for what a text repeats: copies, near-duplicates, and held-out text in training. Nothing is removed.

    Needs no vocabulary. To remove what was found from training, set corpus.remove.
    """
    spec = _of_text(choice)
    if test_set:
        test_sets = [*spec.corpus.test_sets, *test_set]
        spec = spec.with_settings({"corpus.test_sets": test_sets, "corpus.remove": list(REPETITIONS)})
    require_writable_names(plot=plot)
    require_sources(spec)
    with stage_display() as progress:
        folder, findings = check_text(spec.corpus, spec.storage.root, progress)
    if as_json:
        say(findings.model_dump_json(indent=1))
    else:
        _show_findings(findings)
    write_plot(plot, lambda: findings_plot(findings))
    complain(f"findings: {folder / TEXT_FINDINGS}{f'; plot: {plot}' if plot is not None else ''}")


def _show_findings(findings: TextFindings) -> None:
    passages = quantity(findings.passages, "passage")
    say(f"{passages} and {findings.empty_passages:,} empty ones, {findings.text_bytes:,} bytes of text")
    show_table(["length", "passages"], size_rows(findings))
    for line in findings.odd_lines() or ["no control characters, replacement characters or special pieces"]:
        say(line)
    show_table(["", *SPLIT_NAMES], repetition_rows(findings))
    for line in repetition_lines(findings):
        say(line)


def _of_text(choice: TextOptions) -> RunSpec:
    """Return the spec. Raises SpecError if its recipe trains on pairs."""
    made = choice.chosen()
    require_on_text(made.recipe, "data pairs FILE")
    return made.spec()


def _made(spec: RunSpec) -> _Data:
    """Return the data of a run; finished stages are reused. The results are kept under the root, for the run."""
    require_text(spec)
    root = spec.storage.root
    with stage_display() as progress:
        corpus = build_corpus(spec.corpus, root, progress)
        tokenizer = build_tokenizer(spec.tokenizer, spec.corpus, corpus, root, progress)
        workers = shard_workers(spec)
        shards = build_shards(spec.shards, spec.corpus, corpus, tokenizer, root, progress, workers=workers)
    complain(f"token shards: {shards.path}")
    return _Data(corpus, tokenizer, shards)
