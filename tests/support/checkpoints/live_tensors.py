"""Compares consolidated files with the tensors that live engines held."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file

MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors = dict[str, torch.Tensor]


def consolidated(out: Path, stem: str = "model") -> Tensors:
    """The tensors of ``STEM.safetensors``, or of the several files in its place."""
    files = [*out.glob(f"{stem}.safetensors"), *out.glob(f"{stem}-*.safetensors")]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def require_equal(found: Tensors, wanted: Tensors) -> None:
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def require_live(
    out: Path, held: dict[str, Tensors], rename: Callable[[str], str] = str, moments: Iterable[str] = MOMENTS
) -> None:
    """Require that ``out`` has an engine's masters, buffers (in fp32) and moments, by renamed names."""
    buffers = {name: b.float() if b.is_floating_point() else b for name, b in held["buffers"].items()}
    wanted = {"model": held["masters"] | buffers} | {key: held[key] for key in moments}
    for stem, tensors in wanted.items():
        require_equal(consolidated(out, stem), {rename(name): tensor for name, tensor in tensors.items()})


def joined(files: Iterable[Path]) -> dict[str, Tensors]:
    """The tensors of all ranks or stages, by kind. What several of them hold must be equal."""
    held: dict[str, Tensors] = {}
    for path in files:
        for kind, tensors in torch.load(path, weights_only=True).items():
            for name, tensor in tensors.items():
                assert torch.equal(held.setdefault(kind, {}).setdefault(name, tensor), tensor), name
    return held


def name_in_switch_transformers(name: str) -> str:
    """Hugging Face's name of a parameter of experts."""
    name = re.sub(r"moe\.(\d)\.deepspeed_moe\.experts\.deepspeed_experts\.", r"block.\1.mlp.experts.expert_", name)
    return re.sub(r"moe\.(\d)\.deepspeed_moe\.gate\.wg\.", r"block.\1.mlp.router.classifier.", name)
