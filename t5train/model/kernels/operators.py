"""What the kernels of this package have in common: their launches, and operators that ``torch.compile`` keeps whole."""

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch.library import custom_op

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

HOPPER = 9
"""Major compute capability of the GPUs that the kernels were tuned for."""
ROUNDING = MappingProxyType({"enable_fp_fusion": True})
"""Settings of every launch that may change last bits: a product and a sum are rounded once.

It is Triton's default up to 3.9, which warns that it will not stay.
"""


def operator(function: Callable[..., Any]) -> "CustomOpDef":
    """Make a function an operator of its own name that changes none of its arguments.

    torch derives the operator's schema from the annotations, so tensors have to be passed one by one.
    """
    package, name = __name__.partition(".")[0], function.__name__.strip("_")
    return custom_op("::".join((package, name)), function, mutates_args=())
