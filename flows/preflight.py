"""Everything that is cheap to know is asked before anything expensive starts."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flows.host_preflight import require_hosts
from infra import ports, shared_memory
from infra.cluster.attachment import hold_run
from infra.node_store.garbage import size_of
from t5train import start_from
from t5train.data.pydocs import PYDOCS
from t5train.data.sources import require_source
from t5train.data.span_corruption import geometry
from t5train.data.tokenizer import expected_vocab_size, spiece_in
from t5train.destination import check_destination
from t5train.errors import SpecError
from t5train.export import require_exportable
from t5train.host_resources import require_host_memory, require_space
from t5train.model import shape
from t5train.model.shape import T5Shape
from t5train.model.stages import stage_bounds
from t5train.records import digest_file
from t5train.run_files import CHECKPOINTS
from t5train.spec import ClusterSpec, RunSpec
from t5train.train import memory
from t5train.train.checkpoint_bytes import bytes_held
from t5train.train.run import has_finished, require_same_settings

_WEIGHT_BYTES = 4
_RELEASES = 3  # weights, export and publication, where the disk has no hard links
_REST_BYTES = 512 << 20  # Python's documentation, logs, and the server's database


def require_possible(spec: RunSpec) -> T5Shape:
    """The model of a whole chain that settings and given files allow on some machine; raises why they do not."""
    require_exportable(spec.model)
    of_model = _require_model(spec)
    _require_vocabulary_of_start(spec)
    return of_model


def require_ready(spec: RunSpec) -> None:
    """Raise the error that training would raise hours later on this machine, as far as that can be known now."""
    _require_absolute(spec.storage.root)
    require_same_settings(spec)
    of_model = _require_model(spec)
    if spec.cluster.hostfile is None:
        _require_this_machine(spec, of_model)
    parameters = shape.count_parameters(of_model)
    text_bytes = require_text(spec)
    require_space(spec.storage.root, _needed_bytes(spec, of_model, text_bytes), f"run {spec.run_name!r}")
    check_destination(publish_url(spec), _WEIGHT_BYTES * parameters, spec.fingerprint())
    if spec.cluster.hostfile is not None and not has_finished(spec.run_folder):
        require_hosts(spec, of_model, text_bytes)


@contextmanager
def hold_ready_run(spec: RunSpec) -> Iterator[None]:
    """``hold_run`` of a run for which ``require_ready`` holds.

    A run that was begun is held first: its ranks may be at work on hosts, and do not wait long for a head.
    """
    with ExitStack() as stack:
        if spec.run_folder.exists():
            stack.enter_context(hold_run(spec.run_folder))
        require_ready(spec)
        stack.enter_context(hold_run(spec.run_folder))
        yield


def require_text(spec: RunSpec) -> int:
    """Bytes of the text, as far as they are known; InputError where there is none."""
    return 0 if spec.corpus.source == PYDOCS else require_source(spec.corpus.source)


def publish_url(spec: RunSpec) -> str:
    """Where the run is published: the place asked for, else a folder under the root."""
    return spec.storage.publish_to or str(spec.storage.root / "published" / spec.run_name)


def _require_model(spec: RunSpec) -> T5Shape:
    sample = geometry(spec.objective)  # raises where it needs more spans than there are sentinels
    vocab_size = expected_vocab_size(spec.tokenizer)
    start_from.require_fit(spec.model, vocab_size)
    of_model = shape.resolve(spec.model, vocab_size)
    stage_bounds(of_model, spec.layout.pipeline_stages, sample)
    return of_model


def _require_vocabulary_of_start(spec: RunSpec) -> None:
    """SpecError where ids would mean other text than they did to the model to continue from."""
    if spec.model.start_from is None:
        return
    if spec.tokenizer.path is None:
        raise SpecError(
            f"model.start_from is {spec.model.start_from} and tokenizer.path is left out, so that a vocabulary would "
            "be trained which that model does not know: set tokenizer.path to the vocabulary it was trained with"
        )
    start_from.require_vocabulary(spec.model, digest_file(spiece_in(Path(spec.tokenizer.path))).sha256)


def _require_this_machine(spec: RunSpec, of_model: T5Shape) -> None:
    _require_accelerators(spec.cluster)
    _require_arithmetic(spec)
    if spec.cluster.accelerator == "cpu":
        shared_memory.require_room(spec.cluster.ranks)
    require_host_memory(memory.host_bytes(spec, of_model), "layout.offload, cluster.ranks and the model's shape")
    if spec.cluster.master_port is not None:
        ports.require_free(spec.cluster.master_port)


def _require_absolute(root: Path) -> None:
    if not root.is_absolute():
        raise SpecError(f"root is {str(root)!r}: give an absolute path, as a worker runs flows in a folder of its own")


def _require_accelerators(cluster: ClusterSpec) -> None:
    """SpecError when this machine lacks the GPUs that are asked for; of other accelerators only DeepSpeed knows."""
    if cluster.accelerator != "cuda":
        return
    import torch  # slow, and needed where GPUs are only

    if (found := torch.cuda.device_count()) < cluster.ranks:
        raise SpecError(
            f"cluster.accelerator is 'cuda' and cluster.ranks is {cluster.ranks}: this machine has {found} GPUs that "
            "torch can use: ask for fewer ranks, or set cluster.accelerator to cpu"
        )


def _require_arithmetic(spec: RunSpec) -> None:
    """SpecError for fp16 on a CPU without instructions for it, which DeepSpeed refuses when the ranks are up."""
    if spec.optimizer.precision != "fp16" or spec.cluster.accelerator not in (None, "cpu"):
        return
    import torch  # slow, as above

    on_gpu = spec.cluster.accelerator is None and torch.accelerator.is_available()
    if not on_gpu and not torch.ops.mkldnn._is_mkldnn_fp16_supported():  # what DeepSpeed asks
        raise SpecError(
            "optimizer.precision is 'fp16': this machine's CPU has no instructions for it (AVX512-FP16); use bf16 or "
            "fp32, or a GPU"
        )


def _needed_bytes(spec: RunSpec, of_model: T5Shape, text_bytes: int) -> int:
    releases = _WEIGHT_BYTES * _RELEASES * shape.count_parameters(of_model)
    # Tokens take half the bytes of plain text, more of compressed text.
    return _checkpoint_bytes(spec, of_model) + releases + text_bytes + _REST_BYTES


def _checkpoint_bytes(spec: RunSpec, of_model: T5Shape) -> int:
    """Those still to come: a run that goes on is not refused for what it has."""
    if has_finished(spec.run_folder):
        return 0
    held = size_of(spec.run_folder / CHECKPOINTS)
    return max(0, bytes_held(spec, of_model, range(spec.cluster.ranks)) - held)
