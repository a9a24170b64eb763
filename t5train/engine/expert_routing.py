"""Statistics of a model's routers: their losses, the tokens routed to each expert, and the dropped tokens."""

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from t5train.engine.collectives import bits_of, float_of, gather
from t5train.model.t5 import T5
from t5train.records.metrics import STARVING, Values

if TYPE_CHECKING:
    from t5train.model.pipeline.pipeline_model import T5Pipeline

# An expert with less than this fraction of an even share learns almost nothing; the others do its work.
STARVING_SHARE = 0.1
_log = logging.getLogger(__name__)


class Routing:
    """Collects statistics of a model's routers. A dense model has no routers, and all results are empty."""

    def __init__(self, model: "T5 | T5Pipeline") -> None:
        self._layers = dict(model.sparse_layers())
        self._seen = {path: torch.zeros(layer.num_experts, dtype=torch.int64) for path, layer in self._layers.items()}

    def paid(self) -> list[Tensor]:
        """Return the sum of the router losses that this rank's last training pass added to its loss, if there are any.

        It stays on the accelerator.
        """
        losses = [layer.router_loss.detach() for layer in self._layers.values()]
        return [torch.stack(losses).sum()] if losses else []

    def of_step(self, paid: float) -> Values:
        """Return the mean of ``paid`` over all ranks, and the share of a step's routing choices that were dropped."""
        if not self._layers:
            return {}
        counts, overflow, sent = self._collect(bits_of(paid))
        everybody = [float_of(row[0]) for row in sent]
        for path, tokens in counts.items():
            self._seen[path] += torch.tensor(tokens)
        return {"router_loss": sum(everybody) / len(everybody), "dropped_tokens": _share(overflow, counts)}

    def of_validation(self) -> Values:
        """Return the share of routing choices since the last call that exceed ``eval_capacity_factor``."""
        if not self._layers:
            return {}
        counts, overflow, _ = self._collect()
        return {"validation_overflow": _share(overflow, counts)}

    def of_experts(self) -> Values:
        """Return the training tokens routed to each expert since the last call, and the number of starving experts.

        A warning names the starving experts.
        """
        if not self._layers:
            return {}
        tokens: Values = {}
        starving: list[str] = []
        for path, seen in self._seen.items():
            tokens |= {f"tokens/{path}/expert_{expert}": count for expert, count in enumerate(seen.tolist())}
            starving += _starving(path, seen)
            seen.zero_()
        if starving:
            _log.warning(
                "these experts got less than %g of an even share of the tokens: %s",
                STARVING_SHARE,
                ", ".join(starving),
            )
        return {STARVING: len(starving), **tokens}

    def _collect(self, *sent: int) -> tuple[dict[str, list[int]], int, list[list[int]]]:
        """Return tokens by layer and expert, and the number above capacity, over all ranks, since the last call.

        The third result is what each rank has ``sent`` along.
        """
        mine = [part for layer in self._layers.values() for part in (layer.tokens, layer.overflow.view(1))]
        rows = gather([*sent, *torch.cat(mine).tolist()])
        total = [sum(column) for column in zip(*(row[len(sent) :] for row in rows), strict=True)]
        counts, overflow = dict[str, list[int]](), 0
        for path, layer in self._layers.items():
            counts[path], total = total[: layer.num_experts], total[layer.num_experts :]
            overflow, total = overflow + total[0], total[1:]
            layer.reset()
        return counts, overflow, [row[: len(sent)] for row in rows]


def _share(overflow: int, counts: dict[str, list[int]]) -> float:
    return overflow / max(1, sum(map(sum, counts.values())))


def _starving(path: str, seen: Tensor) -> list[str]:
    least = STARVING_SHARE * int(seen.sum()) / len(seen)
    return [f"{path}.experts.expert_{expert}" for expert, tokens in enumerate(seen.tolist()) if tokens < least]
