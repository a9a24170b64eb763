"""Records the witness: digests of the engine's fp32 masters, and logits computed with them on two probes.

Certification compares the exported model with the witness. The witness is therefore made from the masters in the engine
and not from any file. DeepSpeed's own interface provides the masters, independently of our consolidation.

A run with LoRA is recorded as the model that is published: each weight is the start model's own value in fp32, plus the
product of the masters of its adapter. The start model's files give its values, as the engine has only their rounding,
and the engine's weights must be equal to that rounding. The probes' logits are those of these fp32 weights, as in any
run, while training and validation compute with weights in 16 bits.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups, safe_get_full_fp32_param
from safetensors.torch import save
from torch import Tensor, nn

from t5train.checkpoint.state_loading import frozen_weights
from t5train.data.samples.loader import Batch
from t5train.data.vocabulary.held_out import read_held_out
from t5train.engine.collectives import gather_objects, on_accelerator, rank
from t5train.engine.engine import model_of
from t5train.engine.parameter_layout import huggingface_names
from t5train.errors import RanksDisagree, UnknownLayout
from t5train.files.atomic import replacing, write_json
from t5train.model.lora import LORA_A, LORA_B, merged
from t5train.model.model_shape import T5Shape, count_parameters, generation_config
from t5train.model.t5 import T5, PairRows, shift_right
from t5train.model.tensor_files import StoredTensors
from t5train.records.witness import (
    GENERATED_PROBE,
    WITNESS,
    WITNESS_TENSORS,
    TensorDigest,
    TrainedModel,
    Witness,
    computing_environment,
    digest_tensor,
    of_probe,
)
from t5train.spec.rank_job import TrainJob
from t5train.train.datasets.dataset import Dataset


def full_masters(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, fp32 master on the CPU) of every parameter that is trained. A collective of all ranks.

    Raises RanksDisagree if two pipeline stages hold different copies of a tied parameter.
    """
    return _of_all_stages(engine) if engine.pipeline_parallelism else _of_whole_model(engine)


def merged_masters(
    engine: Any, frozen: StoredTensors, scaling: float, *, on_all_ranks: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """On rank 0, yield (Hugging Face name, fp32 value on the CPU) of every parameter, merged with its adapter.

    A collective of all ranks, which all yield them with ``on_all_ranks``. ``frozen`` are the start model's weights.
    Raises RanksDisagree if those of the engine are not their rounding.
    """
    factors, model = dict(full_masters(engine)), model_of(engine)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            continue
        rounded = _whole(parameter)
        if rank() > 0 and not on_all_ranks:
            continue
        weight = frozen.whole(name)
        if not torch.equal(weight.to(rounded.dtype), rounded):
            raise RanksDisagree(
                f"{name} is frozen, but no longer has the values of the model that training started from "
                "(model.start_from): please report this bug"
            )
        a, b = factors.get(name + LORA_A), factors.get(name + LORA_B)
        yield name, weight if a is None or b is None else merged(weight, a, b, scaling)


def _whole(parameter: Any) -> Tensor:
    """Return a frozen parameter on the CPU. At ZeRO 3, ranks join their parts: what else it holds may be released."""
    if not hasattr(parameter, "ds_tensor"):
        return cast(Tensor, parameter.detach().cpu())
    part = parameter.ds_tensor.to(get_accelerator().current_device_name())
    joined = part.new_empty(part.numel() * comm.get_world_size())
    comm.all_gather_into_tensor(joined, part)
    return cast(Tensor, joined[: parameter.ds_numel].view(parameter.ds_shape).cpu())


def _of_whole_model(engine: Any) -> Iterator[tuple[str, Tensor]]:
    copies, model = _whole_copies(engine), model_of(engine)
    names = [huggingface_names(model, expert_rank) for expert_rank in range(model.expert_parallel_size)]
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        whole = _whole_master(engine, name, parameter, copies)
        for expert_rank, held in enumerate(_of_expert_ranks(parameter, whole)):
            yield names[expert_rank][name], held.to("cpu", torch.float32)


def _of_all_stages(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Broadcast the masters of each stage in turn to all ranks. Of a tied parameter, yield only the first copy."""
    model, device = model_of(engine), get_accelerator().current_device_name()
    names = huggingface_names(model, expert_rank=0)
    own = {names[name]: (name, parameter) for name, parameter in model.named_parameters()}
    shapes = {name: list(parameter.shape) for name, (_, parameter) in own.items()}
    digests: dict[str, str] = {}
    for stage, held in enumerate(gather_objects(shapes)[:: engine.dp_world_size]):
        for name, shape in held.items():
            is_own = stage == engine.stage_id
            whole = _whole_master(engine, *own[name], {}) if is_own else torch.empty(shape)
            master = whole.to(device, torch.float32).contiguous()
            comm.broadcast(master, src=stage * engine.dp_world_size)
            is_first, digest = name not in digests, digest_tensor(master.cpu())
            if digests.setdefault(name, digest) != digest:
                raise RanksDisagree(f"stages of the pipeline hold different copies of {name}: please report this bug")
            if is_first:
                yield name, master.cpu()


def _whole_master(engine: Any, name: str, parameter: nn.Parameter, copies: Mapping[Tensor, Tensor]) -> Tensor:
    """Return the fp32 master in the parameter's own shape."""
    master = copies[parameter] if parameter in copies else safe_get_full_fp32_param(parameter)
    if master is None and parameter.dtype == torch.float32:
        master = parameter
    if master is None:
        raise UnknownLayout(
            f"the witness cannot be recorded: DeepSpeed returns no fp32 master of {name} (optimizer "
            f"{type(engine.optimizer).__name__}), so this version of DeepSpeed is not supported. Install a version in "
            "the range of pyproject.toml, then start the run again"
        )
    return cast(Tensor, master.detach().reshape(getattr(parameter, "ds_shape", parameter.shape)))


def _of_expert_ranks(parameter: Any, master: Tensor) -> list[Tensor]:
    """Return the master of a dense parameter; for an expert, those with the same local name on all ranks."""
    if not is_moe_param(parameter):
        return [master]
    ranks = groups._get_expert_parallel_group(parameter.group_name)
    mine = master.to(get_accelerator().current_device_name()).contiguous()
    masters = [torch.empty_like(mine) for _ in range(comm.get_world_size(ranks))]
    comm.all_gather(masters, mine, group=ranks)
    return masters


def _whole_copies(engine: Any) -> dict[Tensor, Tensor]:
    """Return the fp32 copy of each parameter if the optimizer keeps one per parameter (bf16 at ZeRO 0)."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp32_groups"):
        return {}
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {weight: copy for weights, copies in pairs for weight, copy in zip(weights, copies, strict=True)}


PROBE_SEQUENCES = 2
GENERATED_TOKENS = 12


def record(
    engine: Any,
    job: TrainJob,
    shape: T5Shape,
    dataset: Dataset,
    huggingface_config: dict[str, Any],
    facts: dict[str, Any],
    folder: Path,
) -> None:
    """Write ``witness.safetensors`` and then ``witness.json`` to a folder. All ranks must call it; rank 0 writes.

    ``facts`` are the fields of a Witness that the caller knows: run, step, tag, inputs and losses.
    """
    model = T5(shape, decoder_start_id=huggingface_config["decoder_start_token_id"]) if rank() == 0 else None
    places = _places(model) if model is not None else {}
    digests = {}
    for name, master in published(engine, job, shape):
        if model is not None:
            places[name].data.copy_(master)
            digests[name] = _digest(master)
    adapters = dict(full_masters(engine)) if job.spec.finetune.lora.rank else {}
    if model is None:
        return
    held_out = dataset.held_out.batch(0, min(PROBE_SEQUENCES, dataset.held_out.num_samples))
    probes = _probes(held_out, shape, job.spec.optimizer.seed)
    folder.mkdir(exist_ok=True)
    tensors = _forward(model, probes)
    tensors |= _generate(model, of_probe(tensors, GENERATED_PROBE), generation_config(huggingface_config))
    _write_tensors(folder / WITNESS_TENSORS, tensors)
    device_type = torch.device(get_accelerator().current_device_name()).type
    witness = Witness(
        device_type=device_type,
        num_threads=torch.get_num_threads(),
        num_parameters=count_parameters(shape),
        tensors=digests,
        adapters={name: _digest(master) for name, master in adapters.items()},
        ties={"lm_head.weight": "shared.weight"} if shape.tied else {},
        huggingface_config=huggingface_config,
        generation_config=generation_config(huggingface_config),
        trained=_trained(job, dataset),
        passages=read_held_out(job.shards_folder),
        probes=list(probes),
        environment=computing_environment(device_type),
        **facts,
    )
    write_json(folder / WITNESS, witness.model_dump(mode="json"))


def _digest(master: Tensor) -> TensorDigest:
    return TensorDigest(shape=tuple(master.shape), sha256=digest_tensor(master))


def published(
    engine: Any, job: TrainJob, shape: T5Shape, *, on_all_ranks: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, fp32 value) of every parameter of the model that is published.

    A collective of all ranks. With adapters, only rank 0 reads the start model, unless all ranks need the values.
    """
    lora = job.spec.finetune.lora
    if lora.rank is None:
        return full_masters(engine)
    return merged_masters(engine, frozen_weights(job, shape), lora.scaling, on_all_ranks=on_all_ranks)


def _trained(job: TrainJob, dataset: Dataset) -> TrainedModel:
    return TrainedModel(
        run_name=job.spec.run_name,
        recipe=job.spec.recipe,
        start_from=job.start_name,
        layout={"ranks": job.spec.cluster.ranks, **job.spec.layout.model_dump(mode="json")},
        **dataset.described(),
    )


def _places(model: T5) -> dict[str, Tensor]:
    """Return the model's parameters, by their Hugging Face names."""
    names = huggingface_names(model, expert_rank=0)
    return {names[name]: parameter for name, parameter in model.named_parameters()}


class _Probe(NamedTuple):
    """Ids of the encoder and of the targets, and which of the encoder's are no padding; None if there is none."""

    inputs: np.ndarray
    targets: np.ndarray
    mask: np.ndarray | None


def _probes(held_out: Batch, shape: T5Shape, seed: int) -> dict[str, _Probe]:
    """Return two probes by name, random ids and held-out samples, both with the padding of the latter."""
    generator = np.random.default_rng(seed)
    random_inputs = generator.integers(0, shape.vocab_size, held_out.inputs.shape)
    random_targets = generator.integers(0, shape.vocab_size, held_out.targets.shape)
    return {
        "random": _Probe(random_inputs, random_targets, _mask(held_out)),
        "heldout": _Probe(held_out.inputs, held_out.targets, _mask(held_out)),
    }


def _mask(batch: Batch) -> np.ndarray | None:
    return None if batch.segments is None else (batch.segments.inputs > 0).astype(np.int64)


def _forward(model: T5, probes: dict[str, _Probe]) -> dict[str, Tensor]:
    model.to(get_accelerator().current_device_name()).eval()
    tensors = {}
    for name, (inputs, targets, mask) in probes.items():
        input_ids, decoder_ids = on_accelerator(inputs), shift_right(on_accelerator(targets), model.decoder_start_id)
        found = {"input_ids": input_ids, "decoder_input_ids": decoder_ids}
        if mask is not None:
            found["attention_mask"] = on_accelerator(mask)
        with torch.no_grad():
            found["logits"] = model.logits(input_ids, decoder_ids, _rows(found, decoder_ids))
        tensors.update({f"{name}.{key}": value.cpu().contiguous() for key, value in found.items()})
    return tensors


def _rows(probe: Mapping[str, Tensor], decoder_ids: Tensor) -> PairRows | None:
    """Return the rows of a probe, each of one pair, so that the model masks padding of the input as transformers does.

    Also as there, the decoder's ids are not masked. Returns None if the probe has no mask.
    """
    if (mask := probe.get("attention_mask")) is None:
        return None
    return PairRows(mask.to(decoder_ids.device), torch.ones_like(decoder_ids), None, None, torch.ones(()))


def _generate(model: T5, probe: Mapping[str, Tensor], ids: dict[str, int]) -> dict[str, Tensor]:
    """Decode greedily. Also returns the margin of each choice over the second best, relative to the largest logit."""
    input_ids = on_accelerator(probe["input_ids"].numpy())
    with torch.no_grad():
        memory = model.encode(input_ids, _rows(probe, input_ids))
        generated = torch.full_like(memory[:, :1, 0], ids["decoder_start_token_id"], dtype=torch.int64)
        ended = torch.zeros_like(generated[:, 0], dtype=torch.bool)
        margins = []
        for _ in range(GENERATED_TOKENS):
            logits = model.decode(memory, generated, _rows(probe, generated))[:, -1]
            best, second = logits.topk(2).values.unbind(-1)
            margins.append((best - second) / logits.abs().amax(-1).clamp_min(torch.finfo(logits.dtype).tiny))
            chosen = logits.argmax(-1).masked_fill(ended, ids["pad_token_id"])
            ended |= chosen == ids["eos_token_id"]
            generated = torch.cat([generated, chosen[:, None]], dim=1)
    found = {"generated": generated, "margins": torch.stack(margins, dim=1)}
    return {f"{GENERATED_PROBE}.{key}": value.cpu().contiguous() for key, value in found.items()}


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    with replacing(path) as file:
        file.write(save(tensors, metadata={"format": "pt"}))
