"""Everything that the folder of one run says about it, for ``status RUN``. Reads whole files, but hashes none."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from infra.head.launch.start_record import PROGRAM, Start, read_start
from infra.head.runs.run_lookup import root_of_run
from infra.head.runs.run_state import RunState, State, attempts_in, read_json, run_state
from infra.node.attempts import attempt
from infra.node.attempts.attempt import LAUNCHER, Attempt
from infra.node.attempts.exit_record import Cause, ExitRecord
from infra.node.attempts.watchdog import STOP_REQUESTED
from infra.node.node_folders import PAIR_SHARDS, SHARDS
from infra.node.storage.stored_checkpoints import HEAD
from t5train.checkpoint import tags
from t5train.checkpoint.resume_point import LastComplete, last_complete, tags_in
from t5train.errors import Preempted, T5TrainError
from t5train.files import error_report, heartbeat
from t5train.files.presence import file_size, files_below, names_in, visible_in
from t5train.files.run_folder import ATTEMPT_SPEC, CHECKPOINTS, EXPORT, METRICS, REPORT, RUN, step_of
from t5train.records import metrics
from t5train.records.best_so_far import BestSoFar
from t5train.records.metrics import EXACT_MATCH, UNIGRAM, UNIGRAM_OF_TARGETS, VALIDATION_OF_TARGETS
from t5train.records.stage_records import MANIFEST
from t5train.release.certificate import CERTIFICATE
from t5train.spec import EvaluateSpec, PairsSpec
from t5train.spec.recipes import recipe

_ELSEWHERE = {"name", "recipe", "storage.root"}
"""Settings that options and arguments of a command stand for."""
_VALIDATION = "validation_content_loss"
_PARTIAL_PHASES = {"step", "compile"}
_TRAINED = "trained to the last step"


@dataclass(frozen=True)
class AttemptSummary:
    """One start of a run's ranks."""

    number: int
    started_at: str | None
    ended_at: str | None
    """None while it runs, or if it was killed together with its guards."""
    from_step: int | None
    """Step of the checkpoint that it began from."""
    to_step: int | None
    """Last step that was completed."""
    ended: str
    """How it ended, in words."""
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in the run's folder."""

    step: int
    size_bytes: int
    is_complete: bool
    """Whether all sidecars and files are there, in the recorded sizes; their content was not hashed."""
    note: str = ""
    """Why it is unknown whether it is complete."""


@dataclass(frozen=True)
class Losses:
    """Losses in nats per token; None if they were not recorded."""

    first: float | None = None
    last: float | None = None
    best_validation: float | None = None
    """Of masked tokens or, of a run on pairs, of target tokens: what the unigram baseline can be compared with."""
    best_validation_step: int | None = None
    unigram_baseline: float | None = None
    exact_match: float | None = None
    """Of a run on pairs: the share of pairs with an exactly predicted target, at the last validation. Not a loss."""
    exact_match_of_tasks: Mapping[str, float] = field(default_factory=dict)
    """The same of each of several tasks, by name."""
    best_metric: str | None = None
    """What chooses the checkpoint that is the result; None: it is the last one. Only one of these metrics is a loss."""
    best: float | None = None
    best_step: int | None = None


@dataclass(frozen=True)
class RunStory:
    """All that is known of one run."""

    state: RunState
    recipe: str | None
    settings: Mapping[str, Any]
    """Settings that differ from the recipe, with their values."""
    source: str | None
    """The text or the pairs that it trains on."""
    tokens: int | None
    """Tokens of the training split, of pairs those of targets; None if the token shards are not under the root."""
    pairs: int | None
    """Pairs of the training split; None of a run on text, or if the token shards are not under the root."""
    last_start: Start | None
    attempts: list[AttemptSummary]
    checkpoints: list[StoredCheckpoint]
    losses: Losses
    reports: list[Path]
    certificate: str
    """Whether the export is certified, in words."""
    next_command: str | None
    """The command that continues the run; None if it is published or running."""
    faults: list[str]
    """What could not be read, and why."""


T = TypeVar("T")


def run_story(folder: Path) -> RunStory:
    """Return the story of a run. What cannot be read is left out, and named in ``faults``."""
    reading = _Tolerant(folder)
    state = run_state(folder)
    if state.state == State.UNREADABLE:
        reading.faults.append(str(state.error))
    spec: dict[str, Any] = reading.tried(lambda: read_json(folder / RUN).get("spec", {}), {})
    settings: dict[str, Any] = reading.tried(lambda: changed_settings(spec), {}) if spec else {}
    start = reading.tried(lambda: read_start(folder), None)
    counts = reading.tried(lambda: _counts(folder), dict[str, int]())
    return RunStory(
        state=state,
        recipe=spec.get("recipe"),
        settings=settings,
        source=reading.tried(lambda: _source(spec), None) if spec else None,
        tokens=counts.get("train_tokens"),
        pairs=counts.get("train_pairs"),
        last_start=start,
        attempts=reading.tried(lambda: attempt_history(folder, state.state == State.RUNNING), []),
        checkpoints=reading.tried(lambda: stored_checkpoints(folder), []),
        losses=reading.tried(lambda: losses_of(folder, _tasks(spec), _chooses(spec)), Losses()),
        reports=reading.tried(lambda: visible_in(folder / REPORT), []),
        certificate=reading.tried(lambda: _certificate(folder), "unknown"),
        next_command=reading.tried(lambda: _next_command(folder, state, start, spec, settings), None),
        faults=list(dict.fromkeys(reading.faults)),
    )


class _Tolerant:
    """Reads parts of a run, and keeps the errors of those that cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.faults = list[str]()
        self._folder = folder

    def tried(self, read: Callable[[], T], default: T) -> T:
        """Return what ``read`` returns, or ``default`` if that fails."""
        try:
            return read()
        except (T5TrainError, OSError) as error:
            self.faults.append(str(error))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.faults.append(f"a record in {self._folder} is damaged: {error!r}. Restore the file")
        return default


def changed_settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recorded spec that differ from its recipe. Raises SpecError for an unknown recipe."""
    usual = dict(_flat(recipe(spec["recipe"]).model_dump(mode="json")))
    found = dict(_flat(spec))
    return {name: value for name, value in found.items() if name not in _ELSEWHERE and usual.get(name) != value}


def attempt_history(run_folder: Path, is_running: bool) -> list[AttemptSummary]:
    """Return the attempts of a run, oldest first. ``is_running`` says whether a process holds the run."""
    folders = attempts_in(run_folder)
    return [_summary(folder, is_running and folder == folders[-1]) for folder in folders]


def _summary(folder: Path, may_run: bool) -> AttemptSummary:
    try:
        this, job = attempt.read(folder), read_json(folder / ATTEMPT_SPEC)
        names = sorted({name.partition(".")[0] for name in names_in(folder) if name.startswith("rank-")})
        records = {name: this.exit_record(name) for name in names}
        hosts = tuple(this.hosts) if this.hosts else (this.host,)
        from_step = _from_step(job) if job else None
        ended, ended_at = _ended(this, records, may_run)
        beats = (heartbeat.read(heartbeat.beat_file(folder / name)) for name in names)
        done = [beat.step - (beat.phase in _PARTIAL_PHASES) for beat in beats if beat is not None and beat.step > 0]
        to_step = max([*done, from_step or 0]) if done else from_step
        if ended == _TRAINED and _may_end_early(job) and (to_step or 0) < job["spec"]["optimizer"]["num_steps"]:
            ended = f"ended early after step {to_step or 0:,}, without a better validation for too long"
        return AttemptSummary(this.number, this.started_at, ended_at, from_step, to_step, ended, hosts)
    except (T5TrainError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return AttemptSummary(int(folder.name), None, None, None, None, f"unknown: its files are damaged ({error})", ())


def _may_end_early(job: Mapping[str, Any]) -> bool:
    return job.get("spec", {}).get("evaluate", {}).get("patience") is not None


def _from_step(job: dict[str, Any]) -> int:
    if (tag := job.get("resume_tag")) is not None:
        return step_of(tag)
    return int(job["consolidated"]["clock"]["step"]) if job.get("consolidated") else 0


def _ended(this: Attempt, records: dict[str, ExitRecord | None], may_run: bool) -> tuple[str, str | None]:
    """How the attempt ended, and when."""
    known = [record for record in records.values() if record is not None]
    if may_run and len(known) < len(records) | (not records):
        return "running", None
    ended_at = max((record.ended_at for record in known), default=None)
    return _how(this, records), ended_at


def _how(this: Attempt, records: dict[str, ExitRecord | None]) -> str:
    read = {name: error_report.read(this.rank_files(name)) for name in records}
    reported = {name: error for name, error in read.items() if error is not None}
    failed = next((error for error in reported.values() if not isinstance(error, Preempted)), None)
    if failed is not None:
        return str(failed).partition("\n")[0]
    if (killed := next((name for name, record in records.items() if record is None), None)) is not None:
        return f"{_rank(killed)} was killed together with its guard"
    known = [record for record in records.values() if record is not None]
    causes = [record for record in known if record.name not in reported and _is_cause(record)]
    first = min(causes, key=lambda record: record.ended_at, default=None)
    if first is not None:
        return f"{_rank(first.name)} {first}"
    if not records:
        return f"no rank started: the launcher {this.exit_record(LAUNCHER) or 'was killed'}"
    if reported or this.is_stop_ordered or any(each.cause == Cause.REQUESTED and not each.succeeded for each in known):
        return "stopped as requested"
    is_done = all(record.succeeded for record in known)
    return _TRAINED if is_done else f"{_rank(known[0].name)} {known[0]}"


def _is_cause(record: ExitRecord) -> bool:
    """Whether a rank failed by itself; False if it was ended because something else had ended."""
    if record.cause == Cause.REQUESTED:
        return record.reason.startswith(f"{STOP_REQUESTED};")  # it did not stop in time
    return record.is_failure and record.cause not in {Cause.REFUSED, Cause.PARENT}


def _rank(name: str) -> str:
    return f"rank {int(name.removeprefix('rank-'))}"


def stored_checkpoints(folder: Path) -> list[StoredCheckpoint]:
    """Return the checkpoints in a run's folder, oldest first."""
    checkpoints = folder / CHECKPOINTS
    try:
        complete, unknown = set(tags.complete_tags(checkpoints)), ""
    except T5TrainError as error:
        complete, unknown = set[str](), str(error)
    last = last_complete(folder)
    return [
        StoredCheckpoint(
            step=step_of(tag),
            size_bytes=sum(file_size(checkpoints / tag / name) or 0 for name in files_below(checkpoints / tag)),
            is_complete=tag in complete,
            note=unknown or _gathered(tag, last),
        )
        for tag in reversed(tags_in(checkpoints))
    ]


def losses_of(folder: Path, tasks: Sequence[str], evaluate: EvaluateSpec) -> Losses:
    """Return the losses of a run; ``tasks`` are the names of those of a run on pairs."""
    lines = metrics.read(folder / METRICS)
    steps = [loss for line in lines if (loss := line.get("loss")) is not None]
    matches = [line for line in lines if line.get(EXACT_MATCH) is not None]
    of_pairs = bool(matches) or any(UNIGRAM_OF_TARGETS in line for line in lines)
    names = (VALIDATION_OF_TARGETS, UNIGRAM_OF_TARGETS) if of_pairs else (_VALIDATION, UNIGRAM)
    validated = [(loss, line["step"]) for line in lines if (loss := line.get(names[0])) is not None]
    unigram = [loss for line in lines if (loss := line.get(names[1])) is not None]
    chosen = BestSoFar()
    for line in lines:
        chosen = chosen.after(int(line["step"] or 0), line.get(evaluate.best_metric or ""), evaluate.is_higher_better)
    best, step = min(validated, key=itemgetter(0), default=(None, None))
    return Losses(
        first=steps[0] if steps else None,
        last=steps[-1] if steps else None,
        best_validation=best,
        best_validation_step=None if step is None else int(step),
        unigram_baseline=unigram[-1] if unigram else None,
        exact_match=matches[-1][EXACT_MATCH] if matches else None,
        exact_match_of_tasks=metrics.exact_matches(matches[-1], "validation", tasks) if matches else {},
        best_metric=evaluate.best_metric,
        best=chosen.value,
        best_step=chosen.step,
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _gathered(tag: str, last: LastComplete | None) -> str:
    """Where the parts of the last complete checkpoint are, if hosts have them on their own disks."""
    if last is None or last.tag != tag or not last.places:
        return ""
    hosts = sorted({host for places in last.places.values() for host in places if host != HEAD})
    return f"parts of it are also on {', '.join(hosts)}" if hosts else ""


def _source(spec: Mapping[str, Any]) -> str:
    corpus = spec["corpus"]
    return ", ".join(_pairs(spec) or [corpus["source"], *corpus.get("mixed_with", [])])


def _pairs(spec: Mapping[str, Any]) -> list[str]:
    """The files of pairs that a run trains on; empty if it trains on text, as all runs of earlier versions do."""
    return list(spec.get("pairs", {}).get("train", []))


def _tasks(spec: Mapping[str, Any]) -> list[str]:
    """The names of the tasks of a run on pairs; empty for one on text."""
    return [each.task for each in PairsSpec.model_validate(spec["pairs"]).tasks()] if _pairs(spec) else []


def _chooses(spec: Mapping[str, Any]) -> EvaluateSpec:
    """What chooses the checkpoint that is the result."""
    return EvaluateSpec.model_validate({"best_metric": spec.get("evaluate", {}).get("best_metric")})


def _counts(folder: Path) -> dict[str, int]:
    """The counts of the run's token shards; empty if they are not under its root."""
    wanted = read_json(folder / RUN).get("identity", {}).get("shards")
    root = root_of_run(folder)
    for shards in [*visible_in(root / SHARDS), *visible_in(root / PAIR_SHARDS)]:
        if wanted is not None and shards.name.endswith(f"-{wanted[:12]}"):
            return {name: int(count) for name, count in read_json(shards / MANIFEST).get("counts", {}).items()}
    return {}


def _certificate(folder: Path) -> str:
    found = read_json(folder / EXPORT / CERTIFICATE)
    if not found:
        return "none yet"
    return "passed" if found["passed"] else f"failed: {'; '.join(found['differences'])}"


def _next_command(
    folder: Path, state: RunState, start: Start | None, spec: Mapping[str, Any], settings: Mapping[str, Any]
) -> str | None:
    if state.state in {State.PUBLISHED, State.RUNNING}:
        return None
    if start is not None and start.is_own_program:
        command = " ".join(shlex.quote(each) for each in shlex.split(start.command) if each != "--begin-again")
        return f"cd {shlex.quote(start.working_folder)} && {command}"
    if not spec:
        return None
    changes = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]
    arguments = [spec["recipe"], "--root", str(root_of_run(folder)), "--name", folder.name]
    command = "finetune" if _pairs(spec) else "run"
    return shlex.join([PROGRAM, command, *arguments, *(each for change in changes for each in ("--set", change))])
