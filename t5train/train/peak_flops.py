"""The peak rate of an accelerator's matrix products, which model FLOPs utilization (MFU) is relative to."""

import re
from collections.abc import Mapping

import torch
from deepspeed.accelerator import get_accelerator

from t5train.data.samples.span_corruption import row_lengths
from t5train.model.model_shape import T5Shape
from t5train.spec import RunSpec
from t5train.train.flops import training_flops

_TERA = 1e12


def _tensor_cores(both: float, fp32: float | None = None) -> dict[str, float]:
    """Rates in TFLOP/s of a device whose tensor cores multiply bf16 and fp16 at the same rate."""
    return {"bf16": both, "fp16": both} | ({} if fp32 is None else {"fp32": fp32})


_TERAFLOPS: Mapping[str, Mapping[str, float]] = {
    r"\bA10\b": _tensor_cores(125, 31.2),
    r"\bA100\b": _tensor_cores(312, 19.5),
    r"\bB200\b": _tensor_cores(2250),
    r"\bH100 80GB HBM3\b": _tensor_cores(989.4, 66.9),
    r"\bH100 PCIe\b": _tensor_cores(756, 51),
    r"\bH200\b(?! NVL)": _tensor_cores(989.4, 66.9),
    r"\bL40S\b": _tensor_cores(362, 91.6),
    r"\bRTX 3090\b(?! Ti)": _tensor_cores(71, 35.6),
    r"\bRTX 4090\b(?! (D|Laptop))": _tensor_cores(165.2, 82.6),
    r"\bV100-PCIE\b": {"fp16": 112, "fp32": 14},
    r"\bV100-SXM": {"fp16": 125, "fp32": 15.7},
}
"""TFLOP/s by a pattern of the device's name and by precision, from the manufacturer's data sheets.

The rates are those of dense products that are summed in fp32. ``fp32`` is the rate without TF32, which training does
not use.
"""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a device in ``bf16``, ``fp16`` or ``fp32``; None for a device that is not known.

    A part of a device (MIG) has a lower peak, so it counts as unknown.
    """
    if "MIG" in device_name:
        return None
    rates = next((rates for pattern, rates in _TERAFLOPS.items() if re.search(pattern, device_name)), {})
    return rates[precision] * _TERA if precision in rates else None


def accelerator_peak_flops(precision: str) -> float | None:
    """Return the peak FLOP/s of this rank's accelerator; None for a CPU and for a device that is not known."""
    name = accelerator_name()
    return None if name is None else peak_flops(name, precision)


def accelerator_name() -> str | None:
    """Return the name of this rank's accelerator; None for a CPU."""
    accelerator = get_accelerator()
    named = getattr(torch.get_device_module(accelerator.device_name()), "get_device_name", None)
    return named(accelerator.current_device()) if named else None


def utilization(spec: RunSpec, shape: T5Shape, seconds: float, peak: float | None) -> float | None:
    """Return the share of the accelerators' peak that a step of this duration uses; None if the peak is not known."""
    if peak is None:
        return None
    flops = spec.optimizer.global_batch_sequences * training_flops(
        shape, *row_lengths(spec), is_frozen=spec.finetune.lora.rank is not None
    )
    return flops / seconds / (peak * spec.cluster.ranks)
