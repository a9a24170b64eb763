"""Custom operators of this package, which ``torch.compile`` keeps whole in its graph."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.library import custom_op

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef


def operator(function: Callable[..., Any]) -> "CustomOpDef":
    """Make a function an operator of its own name that changes none of its arguments.

    torch derives the operator's schema from the annotations, so tensors have to be passed one by one.
    """
    package, name = __name__.partition(".")[0], function.__name__.strip("_")
    return custom_op("::".join((package, name)), function, mutates_args=())
