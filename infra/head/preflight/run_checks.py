"""Checks a run without asking other hosts: everything that is cheap to check before anything expensive starts."""

from hashlib import sha256
from pathlib import Path

from infra.node import ports
from infra.node.attempts import shared_memory
from infra.node.inspection.hardware import can_have_any
from infra.node.storage.garbage import size_of
from t5train.checkpoint.resume import has_finished, published_name
from t5train.checkpoint.retention import bytes_held, bytes_of_one
from t5train.data.samples.span_corruption import geometry
from t5train.data.vocabulary.tokenizer import expected_vocab_size, given_proto, open_given
from t5train.engine import memory_estimate
from t5train.errors import SpecError
from t5train.files.run_folder import CHECKPOINTS, PUBLICATIONS
from t5train.host_resources import require_host_memory
from t5train.inference.score.row_statistics import metrics_of
from t5train.model import model_shape, starting_model
from t5train.model.model_shape import T5Shape
from t5train.model.pipeline.pipeline_split import stage_bounds
from t5train.records.locations import is_remote_model
from t5train.release.export import require_exportable
from t5train.spec import RunSpec

WEIGHT_BYTES = 4
_RELEASES = 3  # weights, export and publication, if the disk has no hard links
_REST_BYTES = 32 << 20
"""The Prefect server's pages (16 MB) and database, Python's documentation as text, a vocabulary, and reports."""
_STEP_BYTES = 512
"""What metrics and logs grow by in a step, at most."""


def require_possible(spec: RunSpec) -> T5Shape:
    """Return the model's shape. Raises an error if the settings and given files would fail on every machine."""
    require_exportable(spec.model)
    of_model = require_model(spec)
    _require_vocabulary_of_start(spec)
    if spec.evaluate.generates:
        metrics_of(0, 0)  # raises InputError if a package is missing
    return of_model


def publish_url(spec: RunSpec) -> str:
    """Return where the run is published: the requested location, or else a folder under the root."""
    return spec.storage.publish_to or str(spec.storage.root / PUBLICATIONS / published_name(spec))


def require_model(spec: RunSpec) -> T5Shape:
    """Return the model's shape. Raises SpecError if the settings contradict each other or the model to start from."""
    # Raises if a sample needs more spans than there are sentinels. Pairs have no spans, and no pipelines.
    sample = None if spec.is_fine_tuning else geometry(spec.objective)
    vocab_size = expected_vocab_size(spec.tokenizer)
    starting_model.require_fit(spec.model, vocab_size)
    of_model = model_shape.resolve(spec.model, vocab_size)
    if sample is not None:
        stage_bounds(of_model, spec.layout.pipeline_stages, sample)
    return of_model


def _require_vocabulary_of_start(spec: RunSpec) -> None:
    """Raise SpecError if the vocabulary differs from that of the model to start from, if that is on this machine."""
    if spec.model.start_from is None or is_remote_model(spec.model.start_from):
        return
    if spec.tokenizer.path is None:
        raise SpecError(
            f"model.start_from is {spec.model.start_from}, but tokenizer.path is left out, so a new vocabulary would "
            "be trained that the model does not know. Set tokenizer.path to the vocabulary of that model"
        )
    starting_model.require_vocabulary(spec.model, sha256(given_proto(Path(spec.tokenizer.path))).hexdigest())
    starting_model.require_pieces(spec.model, open_given(Path(spec.tokenizer.path)))


def require_capable(spec: RunSpec, of_model: T5Shape) -> None:
    """Raise an error if this machine could not train, whatever else runs on it: accelerators, arithmetic or memory."""
    require_accelerators(spec)
    _require_arithmetic(spec)
    require_host_memory(
        memory_estimate.host_bytes(spec, of_model), "layout.offload, cluster.ranks and the model's shape"
    )


def require_free(spec: RunSpec) -> None:
    """Raise an error if something else on this machine uses the shared memory or the port that training needs."""
    if spec.cluster.accelerator == "cpu":
        shared_memory.require_free_space(spec.cluster.ranks)
    if spec.cluster.master_port is not None:
        ports.require_free(spec.cluster.master_port)


def require_absolute(name: str, path: Path) -> None:
    """Raise SpecError if a path, which ``name`` calls, is relative."""
    if not path.is_absolute():
        raise SpecError(
            f"{name} is {str(path)!r}, a relative path. Give an absolute path, because a Prefect worker has another "
            "working folder"
        )


def require_accelerators(spec: RunSpec) -> None:
    """Raise SpecError if a run on this machine has too few accelerators. Only DeepSpeed can check some kinds."""
    cluster = spec.cluster
    if cluster.hostfile is not None or cluster.accelerator not in (None, "cuda"):
        return
    if cluster.accelerator is None and not can_have_any():
        kind, found = None, 0
    else:
        kind, found = _accelerators()
    if cluster.accelerator is None and kind is None:
        raise SpecError(
            "this machine has no GPU or other accelerator that torch can use, and cluster.accelerator is left out. To "
            "try the recipe on this machine's CPUs with a tiny model, add --trial to the same command. To train on "
            f"CPUs, use the recipe {'reverse_and_sort' if spec.is_fine_tuning else 'smoke'}, or set "
            "cluster.accelerator=cpu"
        )
    usable = found if cluster.accelerator in (None, kind) else 0
    if usable < cluster.ranks:
        what = "GPUs" if "cuda" in (cluster.accelerator, kind) else "accelerators"
        raise SpecError(
            f"cluster.ranks is {cluster.ranks}, but this machine has {usable} {what} that torch can use. Reduce "
            "cluster.ranks, or set cluster.accelerator=cpu"
        )


def _accelerators() -> tuple[str | None, int]:
    """Return the kind of this machine's accelerators, and how many there are. The kind is None if there are none."""
    import torch  # slow, and only needed if there may be some

    kind = torch.accelerator.current_accelerator(check_available=True)
    return (None, 0) if kind is None else (kind.type, torch.accelerator.device_count())


def _require_arithmetic(spec: RunSpec) -> None:
    """Raise SpecError for fp16 on a CPU without fp16 instructions, which DeepSpeed rejects only once ranks run."""
    if spec.optimizer.precision != "fp16" or spec.cluster.accelerator not in (None, "cpu"):
        return
    import torch  # slow, as above

    on_gpu = spec.cluster.accelerator is None and torch.accelerator.is_available()
    if not on_gpu and not torch.ops.mkldnn._is_mkldnn_fp16_supported():  # the check that DeepSpeed makes
        raise SpecError(
            "optimizer.precision is 'fp16', but this machine's CPU has no instructions for it (AVX512-FP16). Use bf16 "
            "or fp32, or a GPU"
        )


def needed_bytes(spec: RunSpec, of_model: T5Shape, text_bytes: int) -> int:
    """Return an estimate of the bytes that a run writes below its root.

    ``text_bytes`` is the size of the text or of the files of pairs.
    """
    releases = WEIGHT_BYTES * _RELEASES * model_shape.count_parameters(of_model)
    # ``text_bytes`` for shards: tokens take half the size of plain text, and more than that of compressed text.
    # With corpus.remove: passages are stored once more, in 0.6 times the size of plain text, and of 100 words each, the
    # keys that they are compared by take 0.2 times that size.
    # Of pairs, a verified copy is kept.
    copies = text_bytes if spec.is_fine_tuning or spec.corpus.removes_passages else 0
    rest = _REST_BYTES + _STEP_BYTES * spec.optimizer.num_steps
    return _checkpoint_bytes(spec, of_model) + releases + text_bytes + copies + rest


def _checkpoint_bytes(spec: RunSpec, of_model: T5Shape) -> int:
    """Disk space for checkpoints still to come. Those that a resumed run already has do not count."""
    if has_finished(spec):
        return 0
    held = size_of(spec.run_folder / CHECKPOINTS)
    # While a checkpoint is copied to a bucket, its files stay, even if the run removes it.
    copied = bytes_of_one(spec, of_model) if spec.checkpoints_url else 0
    return max(0, bytes_held(spec, of_model, range(spec.cluster.ranks)) + copied - held)
