"""Settings of the model.

A mixture of experts takes the place of every n-th feed-forward layer (Switch Transformers: Fedus et al. 2022).
"""

from typing import Any, Literal

from pydantic import Field, field_validator

from t5train.records.locations import is_remote_model, local_folder, redacted
from t5train.spec.settings import SpecPart, check


class ExpertsSpec(SpecPart):
    """A mixture of experts: how many, how tokens are routed to them, and the router's losses."""

    num_experts: int = Field(
        0,
        ge=0,
        le=1024,
        description="Experts in each sparse layer. 0: a dense model, and the settings below have no effect",
    )
    top_k: Literal[1, 2] = Field(
        1, description="Experts per token: 1 as in Switch Transformers; 2 cannot be exported to transformers"
    )
    every_n_layers: int = Field(2, ge=1, description="Every n-th layer of a stack is sparse")
    capacity_factor: float | None = Field(
        1.25,
        gt=0,
        description="Tokens that an expert takes in training, as a multiple of an even share; others are dropped."
        " null: it takes all",
    )
    eval_capacity_factor: float = Field(
        2.0, gt=0, description="Validation drops no tokens, but counts those above this multiple of an even share"
    )
    aux_loss: float = Field(0.01, ge=0, description="Weight of the load-balancing loss")
    z_loss: float = Field(0.001, ge=0, description="Weight of the router's z-loss")

    @check
    def _there_is_a_choice(self) -> None:
        if self.num_experts == 1:
            raise ValueError("model.moe.num_experts is 1: it must be 0 (a dense model) or at least 2")


VOCABULARY_MULTIPLE = 128
PresetName = Literal["smoke", "tiny", "small", "base", "large", "3b", "11b"]


class ModelSpec(SpecPart):
    """The model: a T5, or a Switch Transformer. The preset determines the shape; other settings change parts of it."""

    execution = frozenset({"activation_checkpointing", "compile"})

    preset: PresetName = Field(
        "base",
        description="Shape of the model, that of the published T5 of this size; smoke is a very small one",
    )
    version: Literal["v1.1", "v1.0"] = Field(
        "v1.1",
        description="v1.1: gated GELU, and an output layer of its own. v1.0: ReLU, and the embedding as output layer",
    )
    feed_forward: Literal["gated-gelu", "relu"] | None = Field(
        None, description="Activation of feed-forward layers. null: that of the version"
    )
    d_model: int | None = Field(None, ge=8, description="Width of the model. null: the preset's")
    d_kv: int | None = Field(None, ge=4, description="Width of an attention head. null: the preset's")
    d_ff: int | None = Field(None, ge=8, description="Width of a feed-forward layer. null: the preset's")
    num_heads: int | None = Field(None, ge=1, description="Attention heads of a layer. null: the preset's")
    num_layers: int | None = Field(None, ge=1, description="Layers of the encoder. null: the preset's")
    num_decoder_layers: int | None = Field(None, ge=1, description="Layers of the decoder. null: the preset's")
    vocab_size: int | None = Field(
        None,
        ge=128,
        description="Rows of the embedding, a multiple of 128. null: as many as the tokenizer has, rounded up",
    )
    dropout_rate: float = Field(
        0.0, ge=0, lt=1, description="Share of activations that are dropped in training; 0 as in T5 v1.1"
    )
    activation_checkpointing: bool = Field(
        False,
        description="Compute activations again in the backward pass: less memory, a third more computation",
    )
    compile: bool = Field(False, description="Use torch.compile: faster on GPUs")
    start_from: str | None = Field(
        None,
        description="Model to continue from, in safetensors: a folder with a T5, mT5 or Switch Transformer, "
        "hf://OWNER/NAME[@REVISION] on the Hub, or s3://BUCKET/FOLDER of a published one. null: weights are "
        "initialised from optimizer.seed",
    )
    moe: ExpertsSpec = ExpertsSpec()

    def identity(self) -> dict[str, Any]:
        """Return the identity settings. For a dense model, those of experts are left out, because they have no effect.

        The path in ``start_from`` does not count: the training stage fingerprints the content of that folder.
        """
        values = super().identity()
        if not self.moe.num_experts:
            del values["moe"]
        given = {"start_from": "given"} if values.pop("start_from") is not None else {}
        return values | given

    @property
    def is_gated(self) -> bool:
        """Whether feed-forward layers are gated, with two input layers, wi_0 and wi_1, in place of wi."""
        return (self.feed_forward or ("gated-gelu" if self.version == "v1.1" else "relu")) == "gated-gelu"

    @field_validator("start_from")
    @classmethod
    def _start_can_be_read(cls, start: str | None) -> str | None:
        if start is not None and local_folder(start) is None and not is_remote_model(start):
            raise ValueError(
                f"model.start_from is {redacted(start)}: it must be a folder on this machine, hf://OWNER/NAME or "
                "hf://OWNER/NAME@REVISION, or s3://BUCKET/FOLDER of a published model, without keys. Download other "
                "models first"
            )
        return start

    @check
    def _experts_are_those_of_switch_transformers(self) -> None:
        if self.moe.num_experts and (self.version, self.feed_forward or "relu") != ("v1.0", "relu"):
            raise ValueError(
                f"model.moe.num_experts is {self.moe.num_experts}, model.version {self.version!r} and "
                f"model.feed_forward {self.feed_forward!r}: Switch Transformers have ReLU experts and a tied output; "
                "set model.version=v1.0 and leave model.feed_forward out"
            )

    @check
    def _vocabulary_is_padded(self) -> None:
        if self.vocab_size is not None and self.vocab_size % VOCABULARY_MULTIPLE:
            raise ValueError(
                f"model.vocab_size is {self.vocab_size}: it must be a multiple of {VOCABULARY_MULTIPLE} "
                f"(the next is {pad_vocabulary(self.vocab_size)})"
            )


def pad_vocabulary(pieces: int) -> int:
    """Return the smallest multiple of 128 that holds ``pieces`` ids."""
    return -(-pieces // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
