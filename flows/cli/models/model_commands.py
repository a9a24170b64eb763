"""Commands that use a trained model: ``generate`` and ``evaluate``. They work with the folder of any T5."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.interruption import interrupt_on_stop
from flows.cli.options import JsonOption, RootOption
from flows.cli.stage_commands import require_finished
from flows.cli.terminal import complain, say, stage_display
from t5train.data.passages import Split
from t5train.errors import InputError

if TYPE_CHECKING:
    from t5train.inference.text.evaluation import Evaluation
    from t5train.inference.text.generation import Generated


ModelArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="Folder of a T5: an export, a publication, or any other", readable=False)
]
DeviceOption = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="Such as cuda:1 or cpu", show_default="the accelerator, if any")
]
BeamsOption = Annotated[int, typer.Option(min=1, help="Beams to search with; 1 is greedy")]
SampleOption = Annotated[bool, typer.Option("--sample", help="Sample tokens; implied by --temperature and --top-p")]
TemperatureOption = Annotated[
    float | None, typer.Option(min=0.01, max=100, help="Of sampling; lower is less random", show_default="1.0")
]
TopPOption = Annotated[
    float | None, typer.Option(min=0.01, max=1, help="Sample from this share of probability", show_default="1.0")
]


def generate(  # noqa: PLR0913, PLR0917 - one for each option
    path: ModelArgument,
    texts: Annotated[
        list[str],
        typer.Argument(
            metavar="TEXT...", help="Texts with <extra_id_0>, ..., or sources with their prefix; - for lines on stdin"
        ),
    ],
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens to generate",
            show_default="those of the longest targets of training on pairs, else 16 for each gap, at least 64",
        ),
    ] = None,
    num_beams: BeamsOption = 1,
    sample: SampleOption = False,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Of sampling; the same seed gives the same result")
    ] = 0,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fill the gaps <extra_id_0>, ... of a text or, with a model fine-tuned on pairs, give the target of a source.

    $ t5-pretrain generate work/published/mine 'A model <extra_id_0> text.'
    $ t5-pretrain generate work/published/digits 'reverse: 3 1 4 1 5'
    $ t5-pretrain generate MODEL 'Two <extra_id_0>' --top-p 0.9 --seed 7
    $ t5-pretrain generate work/published/mine - --json < texts.txt
    """
    require_finished(os.fspath(path.absolute()))
    from t5train.inference.text.decoding import GenerationSpec
    from t5train.inference.text.generation import generate as generate_texts

    spec = GenerationSpec.of(
        max_new_tokens=max_new_tokens,
        num_beams=num_beams,
        sample=sample,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    for number, result in enumerate(generate_texts(path, _lines(texts), spec, device)):
        for remark in result.remarks:
            complain(f"warning: text {number + 1}: {remark}")
        if as_json:
            say(json.dumps(result._asdict(), ensure_ascii=False))
        else:
            _show_generated(result, first=number == 0)


def evaluate(  # noqa: PLR0913, PLR0917 - one for each option
    path: ModelArgument,
    corpus: Annotated[str, typer.Option("--corpus", metavar="FILES", help="Text: path, pattern or URL, or pydocs")],
    split: Annotated[
        Split | None, typer.Option(help="Only what training puts into this split", show_default="all text")
    ] = None,
    noise_density: Annotated[
        float | None, typer.Option(help="Share of tokens masked", show_default="as trained, else 0.15")
    ] = None,
    mean_span_tokens: Annotated[
        float | None, typer.Option(help="Mean length of a masked span", show_default="as trained, else 3")
    ] = None,
    input_tokens: Annotated[
        int | None, typer.Option(help="Encoder length, EOS included", show_default="as trained, else 512")
    ] = None,
    batch_sequences: Annotated[int, typer.Option(min=1, help="Sequences at once")] = 8,
    max_sequences: Annotated[
        int | None, typer.Option(min=1, help="At most so many: the first, or those validated on", show_default="all")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Decides which spans are masked; 0 as in validation")
    ] = 0,
    device: DeviceOption = None,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how well a model fills gaps of text: loss and accuracy. For pairs, use `predict` and `score`.

    $ t5-pretrain evaluate MODEL --corpus pydocs --max-sequences 1000
    $ t5-pretrain evaluate MODEL --corpus '/data/*.txt' --split test --json
    """
    interrupt_on_stop()  # so that no text stays in a temporary folder
    require_finished(os.fspath(path.absolute()))
    from t5train.inference.text.evaluation import EvaluationSpec
    from t5train.inference.text.evaluation import evaluate as evaluate_text

    spec = EvaluationSpec(
        noise_density=noise_density,
        mean_span_tokens=mean_span_tokens,
        input_tokens=input_tokens,
        split=split,
        batch_sequences=batch_sequences,
        max_sequences=max_sequences,
        seed=seed,
    )
    with stage_display() as progress:
        result = evaluate_text(path, corpus, spec, device, root, progress)
    if result.split_as_trained is False:
        complain(
            f"warning: this is not the {result.split} split of training, which had a different number of tokens. If "
            "files are added, changed or renamed, passages fall into other splits, and training may have used some of "
            "these. Name the text as it was named for training"
        )
    if as_json:
        say(json.dumps(result._asdict()))
    else:
        _show_evaluation(result)


def _lines(texts: list[str]) -> Iterator[str]:
    """Yield the texts; in place of ``-``, the lines of standard input that are not blank.

    Raises InputError for what is not UTF-8.
    """
    for text in texts:
        if text == "-":
            for number, line in enumerate(sys.stdin.buffer, start=1):
                if line.strip():
                    yield _decoded(line, f"line {number} of standard input").rstrip("\r\n")
        else:
            yield _decoded(os.fsencode(text), "TEXT")


def _decoded(text: bytes, what: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not UTF-8 ({error.reason}). Convert it, for example with iconv") from None


def _show_generated(result: "Generated", first: bool) -> None:
    if not first:
        say("")
    for sentinel, span in result.spans.items():
        say(f"{sentinel}: {span or '(nothing generated)'}")
    say(result.filled)


def _show_evaluation(result: "Evaluation") -> None:
    part = f" of the {result.split} split" if result.split else ""
    say(
        f"{result.sequences:,} sequences of {result.input_tokens} input tokens{part}, {result.tokens:,} masked tokens "
        f"in {result.spans:,} spans of {result.mean_span_tokens:.2f} on average ({result.device})"
    )
    say(f"loss: {result.loss:.4f} nats per masked token (perplexity {result.perplexity:,.1f})")
    say(f"      {result.all_targets_loss:.4f} nats per target token, with sentinels and the end of the text")
    say(f"      {result.unigram_loss:.4f} nats per masked token if only the frequency of tokens in the text is known")
    if result.loss_per_byte is not None:
        bits, span = f"{result.bits_per_byte:.4f} bits", f"{result.masked_bytes / result.spans:.1f} bytes"
        say(f"      {result.loss_per_byte:.4f} nats ({bits}) per byte of masked text, in spans of {span} on average")
    if result.unknown_tokens:
        share = f"{result.unknown_tokens / result.tokens:.2%}"
        say(f"      {share} of masked tokens are unknown pieces, which the loss per byte leaves out")
    say(f"accuracy: {result.token_accuracy:.2%} of masked tokens, {result.span_accuracy:.2%} of whole spans")
    if result.loss >= result.unigram_loss:
        say("On this text, the model predicts no better than the frequencies of tokens do.")
