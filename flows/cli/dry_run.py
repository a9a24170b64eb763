"""Describes a run without running anything, and checks whether it could start on this machine."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flows.cli.pairs_plan import epochs_of_pairs, packed_said, pairs_rows, result_said, start_said
from flows.cli.terminal import say, show_json
from flows.run_parameters import RunParameters
from infra.head.hosts.hostfile import read_hosts
from infra.head.launch.deepspeed_launcher import launch_command
from infra.head.launch.local_launch import command
from infra.head.preflight.pair_checks import require_pairs
from infra.head.preflight.remote_starts import with_start_here
from infra.head.preflight.run_checks import needed_bytes, publish_url, require_possible
from infra.head.preflight.text_checks import TextFacts, bytes_per_token
from infra.head.storage.continued_run import StoredRun, require_own_settings
from infra.head.training_run import launch_spec, rank_program, require_startable_now
from infra.node.attempts import process_guard
from infra.node.attempts.run_lock import require_unused
from infra.node.node_folders import SHARDS, node_path
from t5train.checkpoint.resume import published_name
from t5train.checkpoint.resume_point import require_no_pending_begin_again
from t5train.data.download.source_listing import left_out_lines
from t5train.data.samples.loader import num_windows
from t5train.data.samples.mixture import rates
from t5train.data.samples.span_corruption import geometry, row_lengths
from t5train.data.shards import TEXT_BYTES_PER_TOKEN, settings_of
from t5train.data.sources import PYDOCS
from t5train.data.vocabulary.tokenizer import is_vocabulary_of
from t5train.engine.deepspeed_config import deepspeed_config
from t5train.engine.memory_estimate import Held, held_by_a_rank
from t5train.errors import DigestMismatch, RecordError, T5TrainError, UnknownVersion, Unreadable
from t5train.files.presence import visible_in
from t5train.files.run_folder import ATTEMPT_SPEC, ATTEMPTS
from t5train.host_resources import free_space_bytes
from t5train.model.model_shape import T5Shape, count_parameters
from t5train.quantities import format_bytes, quantity
from t5train.records.identity import fingerprint
from t5train.records.locations import redacted, shown_text
from t5train.records.stage_records import MANIFEST, TokenShards
from t5train.spec import RunSpec
from t5train.spec.known_texts import known_texts


class Epochs(NamedTuple):
    """How often a run uses each passage of the train split."""

    number: float | None
    """None if it is unknown."""
    said: str
    """The number and what it holds for, or why it is unknown."""


class _MadeShards(NamedTuple):
    """Finished token shards; the newest are the greatest."""

    made_at: float
    folder: Path
    windows: int
    """Windows of the train split."""


def show_dry_run(parameters: RunParameters, as_json: bool, begin_again: bool, stored: StoredRun | None = None) -> None:
    """Print what a run would do. Raises the error that the run itself would raise now.

    ``stored`` is the run in a bucket that is to be continued.

    Of a model to start from that is not on this machine, configuration and vocabulary are copied to the root.

    The run is described even if this machine cannot execute it, unless its settings or pairs are invalid. Hosts are
    not asked, and the destination is not tried: both would take long or leave traces.
    """
    spec = with_start_here(parameters.spec())
    shape, refusal = require_possible(spec), None
    text = require_pairs(spec) if spec.is_fine_tuning else None
    epochs = Epochs(None, "not known: what a run that would be refused trains on is not looked at")
    try:
        possible = parameters.spec_for_this_machine()
        if stored is not None:
            require_own_settings(possible, stored)
        if not begin_again:
            require_no_pending_begin_again(spec.run_folder)
        require_unused(spec.run_folder)
        _, text = require_startable_now(possible, text=text)
        epochs = _epochs(spec, text)
    except T5TrainError as error:
        refusal = error
    if as_json:
        show_json(as_values(spec, shape, text, epochs, refusal, stored))
    else:
        say(describe(spec, shape, text, epochs, refusal, stored))
    if refusal is not None:
        raise refusal


def describe(
    spec: RunSpec,
    shape: T5Shape,
    text: TextFacts | None,
    epochs: Epochs,
    refusal: T5TrainError | None,
    stored: StoredRun | None,
) -> str:
    """Return the plan, memory, hosts and launch command of a run, as text. ``as_values`` has the settings too.

    If the run is refused, the text begins with ``refusal``; ``text`` is None then, unless it describes pairs.
    """
    sections = {
        **({"would be refused": str(refusal)} if refusal else {}),
        "plan": _aligned(_plan(spec, shape, text, epochs) | _stores(spec, stored)),
        "memory of a rank without activations, in GB": _table(held_by_a_rank(spec, shape)),
        **_hosts(spec),
        "launch command": shlex.join(_launch_command(spec)),
        "run folder": str(spec.run_folder),
        "more": "with --json: every setting, the fingerprints, and DeepSpeed's configuration",
    }
    return "\n\n".join(f"# {title}\n{content}" for title, content in sections.items())


def _plan(spec: RunSpec, shape: T5Shape, text: TextFacts | None, epochs: Epochs) -> dict[str, str]:
    lengths, per_step = row_lengths(spec), _tokens_per_step(spec)
    if spec.is_fine_tuning:
        data, made_of = pairs_rows(spec, text), packed_said(spec)
    else:
        data = {"text": _text(spec, text)}
        made_of = f"made from {geometry(spec.objective).window_tokens} tokens of text"
    what = "row" if spec.is_fine_tuning else "sequence"
    batch = quantity(spec.optimizer.global_batch_sequences, what)
    return {
        **data,
        "model": f"{count_parameters(shape):,} parameters{start_said(spec, shape)}",
        "a step": f"{per_step:,} tokens: {batch} of {lengths.input_tokens} input and {lengths.target_tokens} target "
        f"tokens, {made_of}",
        "the run": f"{quantity(spec.optimizer.num_steps, 'step')}, {spec.optimizer.num_steps * per_step:,} tokens"
        f"{_early_end_said(spec)}",
        **({"result": result_said(spec)} if spec.evaluate.best_metric else {}),
        "epochs": epochs.said,
        **({"shares": _shares_said(spec, text)} if spec.corpus.mixed_with and not spec.is_fine_tuning else {}),
        "disk": f"up to {format_bytes(_disk_bytes(spec, shape, text))} under {spec.storage.root}, where "
        f"{format_bytes(free_space_bytes(spec.storage.root))} are free",
    }


def _early_end_said(spec: RunSpec) -> str:
    if (patience := spec.evaluate.patience) is None:
        return ""
    return f", or until {quantity(patience, 'validation')} in a row {'is' if patience == 1 else 'are'} not better"


def _stores(spec: RunSpec, stored: StoredRun | None) -> dict[str, str]:
    """Return where the run continues from and where it copies its checkpoints and its model, of what was asked for."""
    rows = dict[str, str]()
    if stored is not None:
        newest = stored.found.ledger.newest
        where = "which has no checkpoint yet" if newest is None else f"whose newest checkpoint is {newest.tag}"
        rows["continues"] = f"from {stored.bucket.url}, {where}"
    elif published_name(spec) != spec.run_name:
        rows["continues"] = f"run {spec.run_name} beyond the end that it was begun with"
    if spec.checkpoints_url is not None:
        rows["checkpoints"] = f"copied to {redacted(spec.checkpoints_url)} while training"
    if spec.storage.publish_to is not None or published_name(spec) != spec.run_name:
        rows["publish to"] = redacted(publish_url(spec))
    return rows


def _tokens_per_step(spec: RunSpec) -> int:
    return spec.optimizer.global_batch_sequences * sum(row_lengths(spec))


def _disk_bytes(spec: RunSpec, shape: T5Shape, text: TextFacts | None) -> int:
    return needed_bytes(spec, shape, text.size_bytes if text else 0)


def _epochs(spec: RunSpec, text: TextFacts) -> Epochs:
    """Return how often the run uses each passage: exact from token shards, otherwise from the size of the text."""
    if spec.is_fine_tuning:
        return Epochs(*epochs_of_pairs(spec))
    samples = spec.optimizer.num_steps * spec.optimizer.global_batch_sequences
    window_tokens = geometry(spec.objective).window_tokens
    if (made := _newest_shards(spec, window_tokens)) is not None:
        number = samples / max(1, made.windows)
        since = f"if the text has not changed since the token shards in {made.folder} were made"
        return Epochs(number, f"{number:,.2f} over the train split{_of_all(spec)}, {since}")
    train_bytes = text.train_bytes(spec.corpus)
    if train_bytes is None:
        return Epochs(None, f"not known yet: {text.why_unknown()}. `t5-pretrain data stats` shows the number")
    local = [file for source in text.sources for file in source.local]
    token_bytes = bytes_per_token(spec.tokenizer, local) or TEXT_BYTES_PER_TOKEN
    number = samples * window_tokens * token_bytes / max(1, train_bytes)
    before = ", before passages are removed" if spec.corpus.removes_passages else ""
    over = f"over the train split{_of_all(spec)}{before}, if a token is {token_bytes:.1f} bytes of text"
    return Epochs(number, f"about {number:,.2f} {over}")


def _shares(spec: RunSpec, text: TextFacts | None) -> list[float] | None:
    """Return the share of each text of a mixture in what is trained on; None if it is unknown."""
    sizes = None if text is None else text.bytes_of_texts()
    if sizes is None and spec.objective.mixing_weights is None:
        return None
    window_bytes = geometry(spec.objective).window_tokens * TEXT_BYTES_PER_TOKEN
    samples = [max(1, size * spec.corpus.split[0] // 1000 // window_bytes) for size in sizes or []]
    return [float(share) for share in rates(samples, spec.objective)]


def _shares_said(spec: RunSpec, text: TextFacts | None) -> str:
    shares = _shares(spec, text)
    if shares is None:
        return "not known yet: they follow from the sizes of the texts, of which not all are known"
    about = "" if spec.objective.mixing_weights else "about "
    return ", ".join(
        f"{about}{share:.1%} {shown_text(source)}" for source, share in zip(spec.corpus.named(), shares, strict=True)
    )


def _of_all(spec: RunSpec) -> str:
    return " of all texts together" if spec.corpus.mixed_with else ""


def _newest_shards(spec: RunSpec, window_tokens: int) -> _MadeShards | None:
    """Return the newest token shards under the root of the same settings and vocabulary. Hashes no text."""
    parts = {"corpus": spec.corpus.identity(), "shards": spec.shards.identity()}
    wanted = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
    found: list[_MadeShards] = []
    for folder in visible_in(spec.storage.root / SHARDS):
        try:
            shards = TokenShards.load(folder)
            if _comparable(settings_of(shards)) == _comparable(wanted) and is_vocabulary_of(
                shards, spec.tokenizer, spec.corpus
            ):
                made_at = (folder / MANIFEST).stat().st_mtime
                found.append(_MadeShards(made_at, folder, num_windows(shards, "train", window_tokens)))
        except (RecordError, UnknownVersion, DigestMismatch, Unreadable, OSError, ValueError, KeyError):
            continue  # unfinished or damaged, so that the run makes them again, or not readable now
    return max(found, default=None)


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of text and shards in which sources end without a slash."""

    def without_slash(value: Any) -> Any:
        return value.rstrip("/") if isinstance(value, str) else [each.rstrip("/") for each in value]

    sources = ("corpus.source", "corpus.mixed_with")
    return {name: without_slash(value) if name in sources else value for name, value in settings.items()}


def _text(spec: RunSpec, text: TextFacts | None) -> str:
    named = [_source(each, spec.corpus.license) for each in spec.corpus.named()]
    if text is None or not text.sources:
        return ", ".join(named)
    size = format_bytes(text.size_bytes) if text.size_bytes else "of unknown size"
    amount = f"{' and '.join(named)}: {quantity(text.num_files, 'file')}, {size}"
    if text.look is not None and text.look.is_whole:
        amount += f", {quantity(text.look.total_passages, 'passage')}"
    return "; ".join([amount, *left_out_lines(text.skipped, text.left_out), *_removal(spec)])


def _source(source: str, licence: str | None) -> str:
    if source == PYDOCS:
        return "Python's documentation"
    known = known_texts().get(source.partition("#")[0])
    shown = shown_text(source)
    return f"{shown} ({known.title}; licence {licence or known.license})" if known is not None else shown


def _removal(spec: RunSpec) -> list[str]:
    if not spec.corpus.removes_passages:
        return []
    listed = [] if spec.corpus.remove_listed is None else [f"the pairs in {spec.corpus.remove_listed}"]
    compared = "".join(f", {redacted(each)}" for each in spec.corpus.test_sets)
    removed = ", ".join([*spec.corpus.remove, *listed])
    return [f"to be removed from training: {removed} (held out: validation, test{compared})"]


def _aligned(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())


def as_values(
    spec: RunSpec,
    shape: T5Shape,
    text: TextFacts | None,
    epochs: Epochs,
    refusal: T5TrainError | None,
    stored: StoredRun | None,
) -> dict[str, Any]:
    """Return the same as ``describe`` as JSON values; docs/reference/json.md describes them."""
    hosts = () if spec.cluster.hostfile is None else read_hosts(spec.cluster).all
    return {
        "refused": str(refusal) if refusal else None,
        "recipe": spec.recipe,
        "name": spec.run_name,
        "run_folder": str(spec.run_folder),
        "parameters": count_parameters(shape),
        "tokens_per_step": _tokens_per_step(spec),
        "tokens": _tokens_per_step(spec) * spec.optimizer.num_steps,
        "estimated_epochs": epochs.number,
        "mixture_shares": _shares(spec, text) if spec.corpus.mixed_with and not spec.is_fine_tuning else None,
        "disk_needed_bytes": _disk_bytes(spec, shape, text),
        "disk_free_bytes": free_space_bytes(spec.storage.root),
        "publish_to": _shown(spec.storage.publish_to),
        "checkpoints_url": _shown(spec.checkpoints_url),
        "continues_from": None if stored is None else stored.bucket.url,
        "spec": spec.model_dump(mode="json"),
        # Those of the parts are of their settings. The fingerprints of results also include their inputs.
        "fingerprints": {
            "run": spec.fingerprint(),
            **{part: fingerprint(values) for part, values in spec.identity().items()},
        },
        "deepspeed_config": deepspeed_config(spec, shape),
        "memory_of_a_rank": [
            {"what": each.what, "accelerator_bytes": each.accelerator, "host_bytes": each.host}
            for each in held_by_a_rank(spec, shape)
        ],
        "hosts": [{"name": host.name, "slots": list(host.slots)} for host in hosts],
        "launch_command": _launch_command(spec),
    }


def _shown(url: str | None) -> str | None:
    return None if url is None else redacted(url)


def _hosts(spec: RunSpec) -> dict[str, str]:
    """Return a table with the ranks of each host; empty without a hostfile."""
    if spec.cluster.hostfile is None:
        return {}
    rows, first = [f"{'ranks':14}{'host':28}slots"], 0
    for host in read_hosts(spec.cluster).all:
        last = first + len(host.slots) - 1
        rows.append(f"{f'{first} to {last}':14}{host.name:28}{', '.join(map(str, host.slots))}")
        first = last + 1
    return {"hosts": "\n".join(rows)}


def _launch_command(spec: RunSpec) -> list[str]:
    if spec.cluster.hostfile is None:
        return command(launch_spec(spec, lambda *_: None), spec.run_folder / ATTEMPTS / "NNNN")
    hosts, run_id = read_hosts(spec.cluster), f"{spec.run_name}-NNNN-ID"
    on_nodes = node_path("attempts", run_id)
    program = (
        process_guard.MODULE,
        str(on_nodes),
        sys.executable,
        *rank_program(on_nodes / ATTEMPT_SPEC),
    )
    address = spec.cluster.master_address or f"ADDRESS_OF_{hosts.names[0]}"
    rendezvous = (address, spec.cluster.master_port or "FREE_PORT")
    return launch_command(spec.cluster, hosts, node_path("heads", run_id), master=rendezvous, program=program)


def _table(held: list[Held]) -> str:
    rows = [
        ("", "accelerator", "host"),
        *((one.what, _gigabytes(one.accelerator), _gigabytes(one.host)) for one in held),
    ]
    return "\n".join(f"{what:28}{accelerator:>12}{host:>8}" for what, accelerator, host in rows)


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f}" if size_bytes else "."
