"""Lets ranks on CPUs train with the fused update, in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from t5train.engine import engine
from tests.support.needed_triton import speed_up_interpreter


@contextmanager
def fused(bucket_elements: int = 10_000) -> Iterator[None]:
    """Make engines that are built within the block update their weights with our kernels.

    Buckets are small by default, so that the small models of tests have several.
    """
    from t5train.engine import fused_update  # needs Triton, which other tests do without
    from t5train.engine.fused_update import FusedUpdate

    speed_up_interpreter()
    gather = FusedUpdate._gather_weights

    def round_and_gather(self: FusedUpdate) -> None:
        """Round weights as a GPU does, because the interpreter truncates them."""
        for number, flat in enumerate(self._flats):
            self._rounded(number).copy_(flat)
        gather(self)

    with (
        mock.patch.object(engine, "_can_fuse_update", lambda built: built.zero_optimization_stage() < 3),
        mock.patch.object(engine, "_can_fuse_parts", lambda built: built.zero_optimization_stage() == 3),
        mock.patch.object(FusedUpdate, "_gather_weights", round_and_gather),
        mock.patch.object(fused_update, "BUCKET_ELEMENTS", bucket_elements),
    ):
        yield
