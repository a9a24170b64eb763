"""Compiles every kernel for some kinds of GPU, which need not be there, as its launches would.

``python -m tests.support.kernel_builds CAPABILITY...`` writes the bytes of shared memory as JSON, ``{capability:
{"kernel of case": bytes}}``.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from t5train.engine.optimizer import Partition, Segment
from t5train.engine.partition_update import Chunks, Gradients, Settings, squares, update
from t5train.model.attention import AttentionRows
from t5train.model.kernels import biased_attention, gated_gelu


def main(capabilities: list[int]) -> None:
    sys.stdout.write(json.dumps({capability: _built(capability) for capability in capabilities}) + "\n")


def _built(capability: int) -> dict[str, int]:
    found: dict[str, int] = {}
    cases = CASES if capability == 90 else {name: CASES[name] for name in EVERYWHERE}
    for case, launch in cases.items():

        def build(kernel: Any, *arguments: Any, grid: Any, warmup: bool, case: str = case, **options: Any) -> None:
            found[f"{kernel.__name__} of {case}"] = _shared_memory(kernel, capability, arguments, options)

        with (
            mock.patch.object(biased_attention, "capability", return_value=capability),
            mock.patch.object(JITFunction, "run", build),
        ):
            launch()
    return found


def _shared_memory(kernel: Any, capability: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
    """Compile a launch as Triton does on a GPU."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    bound, specialization, chosen = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *arguments, **options
    )
    parsed, *source = kernel._pack_args(backend, options, bound, specialization, chosen)
    built = triton.compile(ASTSource(kernel, *source), target=target, options=parsed.__dict__)
    return int(built.metadata.shared)


def _attention(d: int, causal: bool, rate: float | None = None) -> Callable[[], None]:
    """Launches of attention on text, or with a ``rate`` of dropout on pairs."""

    def launch() -> None:
        packed = torch.zeros(2, 100, 3, 2, d, dtype=torch.bfloat16, requires_grad=True)
        table = biased_attention.table_of(torch.zeros(2, 257)).requires_grad_()
        segments, keys = torch.ones(2, 100, dtype=torch.int32), torch.zeros(2, 100, dtype=torch.int64)
        rows = AttentionRows(segments, segments, keys if rate else None, keys if rate else None)
        biased_attention.biased_attention(
            None, packed, table, causal, None if rate is None else rows, rate or 0.0
        ).sum().backward()

    return launch


def _gelu(rate: float | None = None) -> None:
    joint = torch.zeros(4, 64, dtype=torch.bfloat16, requires_grad=True)
    keys = None if rate is None else torch.zeros(4, dtype=torch.int64)
    gated_gelu.gated_gelu(joint, keys, rate or 0.0).sum().backward()


def _update() -> None:
    flat, gradient = torch.zeros(3, 64), torch.zeros(64, dtype=torch.bfloat16)
    chunks = Chunks.of(Partition([Segment(0, 64, 0, 64, 0)], 1), flat.device)
    held = Gradients.of(chunks, [gradient])
    state = (flat[0], flat[1], flat[2])
    sums = squares(chunks, flat[0], held)
    settings = Settings(0.01, 1, (0.9, 0.999), 1e-8, 0.0, 1.0, relative=True)
    update(chunks, state, held, gradient.clone(), sums[0], torch.ones(()), settings)


CASES = {
    "64, causal": _attention(64, causal=True),
    "64, causal, pairs": _attention(64, causal=True, rate=0.0),
    "64, pairs with dropout": _attention(64, causal=False, rate=0.1),
    "128": _attention(128, causal=False),
    "128, causal, pairs with dropout": _attention(128, causal=True, rate=0.1),
    "gated GELU": _gelu,
    "gated GELU with dropout": partial(_gelu, 0.1),
    "update": _update,
}
EVERYWHERE = ("64, causal", "128", "128, causal, pairs with dropout", "gated GELU with dropout", "update")
"""The cases that are compiled for each kind of GPU, with and without pairs: all of them would take minutes."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    main([int(each) for each in sys.argv[1:]])
