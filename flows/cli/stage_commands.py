"""One command for each stage; none of them imports Prefect."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flows.cli.interruption import explaining_interruption, naming_command_to_continue
from flows.cli.options import (
    AdoptOption,
    BeginAgainOption,
    Chosen,
    CorpusOption,
    HostOptions,
    JsonOption,
    NameOption,
    SetOption,
    SmokeOptions,
    SpecOptions,
    TrainingHostOptions,
    settings,
    text_settings,
    with_options,
)
from flows.cli.status_command import steps_text
from flows.cli.terminal import complain, say, show_json, stage_display
from flows.spec_from_recipe import require_on_text
from infra.head.preflight.remote_starts import complete_start, with_start_here
from infra.head.preflight.text_checks import NOT_READ
from infra.head.runs.run_lookup import root_of_run, run_of_result
from infra.head.runs.run_state import State, run_state
from infra.head.tokenising.hosts_executor import workers_for
from infra.head.training_run import hold_ready_run, train_again, train_run
from t5train.checkpoint.resume import load_run_spec
from t5train.checkpoint.resume_point import require_no_pending_begin_again
from t5train.data.corpus import build_corpus
from t5train.data.pairs.pairs import build_pairs
from t5train.data.pairs.pairs_tokenizer import build_pairs_tokenizer
from t5train.data.shards import build_shards, settings_of
from t5train.data.vocabulary.tokenizer import build_tokenizer, given_tokenizer
from t5train.errors import InputError, RecordError, SpecError
from t5train.files.presence import is_there, visible_in
from t5train.files.run_folder import WITNESS_FOLDER
from t5train.quantities import quantity
from t5train.records.locations import local_folder, redacted, shareable_source, shown_text
from t5train.records.metrics import loss_lines
from t5train.records.stage_records import MANIFEST, Export, Record, TokenizerFiles, TokenShards, Weights
from t5train.records.witness import Witness
from t5train.release.certification import certify_in_fresh_process
from t5train.release.export import export as export_folder
from t5train.release.fetching import fetch as fetch_publication
from t5train.release.publication import check_destination
from t5train.release.publication import publish as publish_export
from t5train.release.verification import verify as verify_record
from t5train.report.data_report import data_lines
from t5train.report.data_statistics import train_split_facts
from t5train.spec import CorpusSpec, MachinesSpec, RunSpec, ShardsSpec
from t5train.spec.recipes import TRIAL_STEPS
from t5train.spec.training_spec import MIXING

_LISTED = "corpus.remove_listed"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


@with_options
def corpus(choice: SmokeOptions, text: CorpusOption = None) -> None:
    """Find or make the text, and verify all its files.

    $ t5-pretrain corpus --corpus '/data/*.jsonl.gz' --root /data/t5
    $ t5-pretrain corpus --config run.yaml
    """
    chosen = choice.chosen(text_settings(text))
    require_on_text(chosen.recipe, "data pairs FILE")
    spec = chosen.spec()
    with stage_display() as progress:
        made = build_corpus(spec.corpus, spec.storage.root, progress)
    _say(made)


@with_options
def tokenizer(choice: SmokeOptions) -> None:
    """Train the vocabulary of a recipe on its text or pairs, or use the given one.

    $ t5-pretrain tokenizer smoke
    $ t5-pretrain tokenizer --config run.yaml --set tokenizer.vocab_size=8000
    """
    spec = with_start_here(choice.chosen().spec())
    with stage_display() as progress:
        if spec.is_fine_tuning:
            pairs = build_pairs(spec.pairs, spec.storage.root, progress)
            made = build_pairs_tokenizer(spec.tokenizer, pairs, spec.storage.root, progress)
        else:
            text = build_corpus(spec.corpus, spec.storage.root, progress)
            made = build_tokenizer(spec.tokenizer, spec.corpus, text, spec.storage.root, progress)
    _say(made)


@with_options
def tokenize(  # noqa: PLR0913, PLR0917 - Typer makes an option of each parameter
    hosts: HostOptions,
    source: Annotated[str, typer.Option("--corpus", metavar="FILES", help="Text: path, pattern or URL")],
    vocabulary: Annotated[
        Path, typer.Option("--tokenizer", help="A spiece.model or a Hugging Face folder", readable=False)
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for shards, and for the records of corpus and tokenizer", readable=False)
    ],
    workers: Annotated[int | None, typer.Option(min=1, help="Processes", show_default="all cores")] = None,
    shard_tokens: Annotated[
        int, typer.Option(min=4096, help="Target number of tokens per shard")
    ] = ShardsSpec().shard_tokens,
    max_unknown_share: Annotated[
        float, typer.Option(min=0, max=1, help="Largest share of unknown pieces in the text to train on")
    ] = ShardsSpec().max_unknown_share,
    changes: SetOption = None,
) -> None:
    """Convert text to files of token ids with a given vocabulary.

    With --hostfile, all its hosts do so, with Dask. They have to share the folder.

    $ t5-pretrain tokenize --corpus '/data/*.txt' --tokenizer T5_MODEL --out tokens
    """
    text_spec, root = CorpusSpec(source=source, workers=workers), out.absolute()
    changed = settings(changes) | hosts.settings()
    if "shards.executor" in changed:
        raise SpecError(
            "--set shards.executor cannot be used here: with --hostfile FILE, all its hosts tokenise with Dask, and "
            "without it, this machine does. Leave out --set shards.executor"
        )
    cluster = MachinesSpec.of(changed).cluster
    executor: Literal["local", "dask"] = "local" if cluster.hostfile is None else "dask"
    shards = ShardsSpec(
        workers=workers, shard_tokens=shard_tokens, executor=executor, max_unknown_share=max_unknown_share
    )
    on_hosts = workers_for(shards, cluster)
    with stage_display() as progress:
        pieces = given_tokenizer(vocabulary, root, progress, out=root / "tokenizer")
        text = build_corpus(text_spec, root, progress, out=root / "corpus")
        made = build_shards(shards, text_spec, text, pieces, root, progress, out=root / "shards", workers=on_hosts)
    _say(made)


@with_options
def train(
    options: SpecOptions,
    hosts: TrainingHostOptions,
    name: NameOption = None,
    shards: Annotated[
        Path | None,
        typer.Option(help="Folder of token shards", show_default="the only one under the root", readable=False),
    ] = None,
    begin_again: BeginAgainOption = False,
    adopt: AdoptOption = False,
) -> None:
    """Train on existing token shards, starting from the newest complete checkpoint.

    $ t5-pretrain train smoke --shards tokens/shards
    $ t5-pretrain train --config run.yaml
    """
    choice = options.chosen(hosts.settings(), name)
    require_on_text(choice.recipe, f"finetune {choice.recipe}")
    tokens = TokenShards.load(shards or _only_shards(_root_of(choice)))
    spec = with_start_here(_spec_on(tokens, choice))
    if not begin_again:
        require_no_pending_begin_again(spec.run_folder)
    with (
        hold_ready_run(spec, text=NOT_READ) as run,
        explaining_interruption(spec.run_folder, spec.optimizer.num_steps),
        stage_display() as progress,
    ):
        texts = ", ".join(map(shown_text, spec.corpus.named()))
        complain(f"text: {texts}, as token shards in {tokens.path}")
        tokens.verify(progress)
        complete_start(spec, progress)
        for line in data_lines(spec, tokens, train_split_facts(tokens, spec.objective)):
            complain(line)
        if begin_again:
            train_again(spec, run)
        made = train_run(spec, tokens, run, progress, adopt=adopt)
    losses = Witness.load(spec.run_folder / WITNESS_FOLDER).validation
    for line in loss_lines(losses, is_trial=spec.optimizer.num_steps <= TRIAL_STEPS):
        say(line)
    _say(made)


def consolidate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT_DIR", help="Folder with tags, or folder of one tag", readable=False)
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the fp32 safetensors", readable=False)],
    tag: Annotated[str | None, typer.Option(help="Tag", show_default="the best, or the newest complete one")] = None,
    shard_size: Annotated[
        str | None, typer.Option(help="Maximum file size, such as 5G or 500Mi", show_default="one file")
    ] = None,
    moments: Annotated[bool, typer.Option("--moments", help="Write Adam's two moments, too")] = False,
    start: Annotated[Path | None, typer.Option("--start-from", help="Model to merge LoRA's adapters with")] = None,
) -> None:
    """Convert a DeepSpeed checkpoint to fp32 safetensors.

    $ t5-pretrain consolidate work/runs/mine/checkpoints weights
    $ t5-pretrain consolidate checkpoints weights --shard-size 5G --moments
    """
    from t5train.checkpoint.consolidate import consolidate as convert  # imports torch

    size, model = _bytes(shard_size) if shard_size else None, str(start) if start else None
    with stage_display() as progress:
        made = convert(checkpoint, out, tag=tag, shard_bytes=size, moments=moments, start_from=model, progress=progress)
    _say(made, f", of step {made.counts['step']:,}")


def export(
    weights: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="Folder made by `consolidate`", readable=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the Hugging Face model", readable=False)],
    run: Annotated[Path, typer.Option(help="Folder of the run that trained it", readable=False)],
    vocabulary: Annotated[Path, typer.Option("--tokenizer", help="Folder made by `tokenizer`", readable=False)],
) -> None:
    """Write a Hugging Face folder from consolidated weights.

    $ t5-pretrain export weights model --run work/runs/mine --tokenizer TOKENIZER
    """
    spec = load_run_spec(run)
    with stage_display() as progress:
        files = TokenizerFiles.load(vocabulary)
        made = export_folder(Weights.load(weights), files, run / WITNESS_FOLDER, spec, out, progress)
    _say(made)


def certify(
    exported: Annotated[Path, typer.Argument(metavar="EXPORT", help="Folder made by `export`", readable=False)],
    witness: Annotated[Path, typer.Argument(metavar="WITNESS", help="Folder `witness` of the run", readable=False)],
    start: Annotated[Path | None, typer.Option("--start-from", help="Folder that a run with LoRA started from")] = None,
) -> None:
    """Prove, in a new process, that an export is the model that was trained.

    $ t5-pretrain certify model work/runs/mine/witness
    """
    with stage_display() as progress:
        made = certify_in_fresh_process(Export.load(exported), witness, progress, str(start) if start else None)
    _say(made)


def publish(
    exported: Annotated[Path, typer.Argument(metavar="EXPORT", help="Certified folder", readable=False)],
    url: Annotated[str, typer.Argument(metavar="URL", help="Folder or fsspec URL")],
) -> None:
    """Publish a certified export to a folder or an object store.

    $ t5-pretrain publish model /data/published/mine
    $ t5-pretrain publish model s3://bucket/t5/mine
    """
    export_to_publish = Export.load(exported)
    check_destination(url)
    with naming_command_to_continue(), stage_display() as progress:
        made = publish_export(export_to_publish, url, progress)
    say(f"published: {made.url}")


def verify(
    place: Annotated[str, typer.Argument(metavar="PATH_OR_URL", help="Folder or fsspec URL")],
    as_json: JsonOption = False,
) -> None:
    """Compare every byte of a finished folder or publication with its manifest.

    $ t5-pretrain verify work/published/mine
    $ t5-pretrain verify s3://bucket/t5/mine --json
    """
    require_finished(place)
    with stage_display() as progress:
        record = verify_record(place, progress)
    total = sum(digest.size for digest in record.files.values())
    if as_json:
        facts = {"kind": record.kind, "location": redacted(place), "fingerprint": record.fingerprint}
        show_json(facts | {"files": len(record.files), "bytes": total})
        return
    what = "last checkpoint of" if record.kind == "checkpoint" else record.kind
    say(f"verified: {what} {place}, {quantity(len(record.files), 'file')}, {quantity(total, 'byte')}")


def fetch(
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://BUCKET/FOLDER of a publication")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create", readable=False)],
) -> None:
    """Copy a publication from S3 to a folder, verified. An interrupted copy continues.

    $ t5-pretrain fetch s3://bucket/t5/mine model
    """
    with naming_command_to_continue(), stage_display() as progress:
        made = fetch_publication(url, folder, progress)
    say(f"fetched: {made.path}{' (there already, verified)' if made.reused else ''}")


def require_finished(place: str) -> None:
    """Raise RecordError if there is no result at a place because the run that makes it has not finished.

    Raises InputError if the place looks like the name of a run.
    """
    folder = local_folder(place)
    if folder is not None and "/" not in place and not is_there(folder):
        raise InputError(
            f"there is no folder {folder}: give the folder or URL of a result. If {place} is the name of a run, "
            f"`t5-pretrain status {place}` shows its folders"
        )
    if folder is None or is_there(folder / MANIFEST) or (run := run_of_result(folder)) is None:
        return
    found = run_state(run)
    if found.state in {State.PUBLISHED, State.UNREADABLE}:
        return
    at = "" if found.num_steps is None else f", at step {steps_text(found)}"
    remedy = "Wait until it is published" if found.state == State.RUNNING else "Continue it first"
    raise RecordError(
        f"{folder} has no {MANIFEST} yet, because run {run.name} has not finished: its state is '{found.state}'{at}. "
        f"{remedy}; `t5-pretrain status {run.name} --root {root_of_run(run)}` shows more"
    )


def _spec_on(shards: TokenShards, choice: Chosen) -> RunSpec:
    """Return the spec of a run on token shards: their text is that of the run, whatever the recipe says.

    Raises SpecError if another text was chosen, or if the shards do not record theirs and none was chosen.
    """
    recorded = settings_of(shards)
    if recorded.get(_LISTED) and _LISTED not in choice.named:
        raise SpecError(
            f"the token shards in {shards.path} were made without passages that a file of pairs lists. Name that file: "
            f"add --set {_LISTED}=FILE"
        )
    made_with = {name: json.dumps(value) for name, value in recorded.items() if name not in choice.named}
    spec = choice._replace(settings=made_with | choice.settings).spec()
    for name, value in _with_unset(recorded).items():
        if name in choice.named and not _is_same(name, asked := _value(spec, name), value):
            raise SpecError(
                f"{name} is {asked!r}, but the token shards in {shards.path} were made with {value!r}: leave {name} "
                "out, name other shards with --shards, or use `run`, which makes them"
            )
    if not recorded and "corpus.source" not in choice.named:
        raise SpecError(
            f"the token shards in {shards.path} were made by an earlier version, which did not record the text that "
            "they were made of, but the model card names it: add --set corpus.source=TEXT"
        )
    return spec


def _with_unset(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of text and shards that shards record, and the defaults of those that were not set."""
    defaults = {"corpus": CorpusSpec(), "shards": ShardsSpec()}
    unset = {
        f"{part}.{name}": value
        for part, spec in defaults.items()
        for name, value in spec.model_dump(mode="json").items()
        if name not in spec.execution
    }
    return {**unset, **recorded} if recorded else {}


def _value(spec: RunSpec, name: str) -> Any:
    part, key = name.split(".")
    return spec.model_dump(mode="json")[part][key]


def _is_same(name: str, asked: Any, recorded: Any) -> bool:
    """Whether a chosen setting agrees with the shards'. Text may have been moved, and its revision is only a name."""
    if name == "corpus.source":
        return shareable_source(asked) == shareable_source(recorded)
    if name == _LISTED:
        return bool(asked) == bool(recorded)  # shards record only that there was one
    if name == "corpus.mixed_with":
        return list(map(shareable_source, asked)) == list(map(shareable_source, recorded))
    return name == "corpus.revision" or bool(asked == recorded)


def _root_of(choice: Chosen) -> Path:
    """Return the root folder. Rates of a mixture are left out, as they are valid only with the texts of the shards."""
    settings = {name: value for name, value in choice.settings.items() if name.partition(".")[2] not in MIXING}
    return choice._replace(settings=settings).spec().storage.root


def _only_shards(root: Path) -> Path:
    """Return the folder that a run has made, or that ``tokenize --out`` of this root has."""
    found = [folder for folder in (root / "shards", *visible_in(root / "shards")) if (folder / MANIFEST).exists()]
    if not found:
        raise InputError(
            f"there are no token shards under {root / 'shards'}: name a folder of them with --shards, or use `run`"
        )
    if len(found) > 1:
        raise InputError(f"there are several token shards ({', '.join(map(str, found))}): choose one with --shards")
    return found[0]


def _bytes(size: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]I?)?B?", size.upper())
    if match is None or int(match[1]) == 0:
        raise typer.BadParameter(f"{size!r} is not a size such as 5G or 500Mi", param_hint="--shard-size")
    return int(match[1]) * _UNITS[match[2] or ""]


def _say(record: Record, what: str = "") -> None:
    say(f"{record.kind}: {record.path}{what}{' (reused)' if record.reused else ''}")
