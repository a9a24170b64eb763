"""A mixture of experts in place of every n-th feed-forward (Switch Transformers: Fedus et al. 2022)."""

from typing import Literal, Self

from pydantic import Field, model_validator

from t5train.spec.part import SpecPart


class ExpertsSpec(SpecPart):
    """How many experts a sparse layer has, how tokens find them, and what the router pays for it."""

    num_experts: int = Field(0, ge=0, le=1024, title="Experts", description="Of each sparse layer; 0: a dense model")
    top_k: Literal[1, 2] = Field(
        1, title="Experts a token", description="1 as Switch Transformers; 2 has no model in transformers to export to"
    )
    every_n_layers: int = Field(2, ge=1, title="Every n layers", description="Every n-th layer of a stack is sparse")
    capacity_factor: float = Field(
        1.25,
        gt=0,
        title="Capacity",
        description="Tokens an expert takes while training, in even shares; more are dropped",
    )
    eval_capacity_factor: float = Field(
        2.0,
        gt=0,
        title="Capacity held against",
        description="Validation drops nothing, and counts what lies above this",
    )
    aux_loss: float = Field(0.01, ge=0, title="Balance loss", description="Weight of the load-balancing loss")
    z_loss: float = Field(0.001, ge=0, title="Router z-loss", description="Weight of the squared log-sum-exp of logits")

    @model_validator(mode="after")
    def _there_is_a_choice(self) -> Self:
        if self.num_experts == 1:
            raise ValueError("model.moe.num_experts is 1: it must be 0 (a dense model) or at least 2")
        return self
