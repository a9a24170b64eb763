"""The parts of a RunSpec."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from t5train.locations import local_folder, redacted, without_secret
from t5train.spec.experts import ExpertsSpec
from t5train.spec.part import SpecPart

VOCABULARY_MULTIPLE = 128
NUM_SENTINELS = 100


class CorpusSpec(SpecPart):
    """Which text, and how it is split."""

    execution = frozenset({"workers"})

    source: str = Field(
        "pydocs",
        title="Source",
        description="'pydocs', or a path, pattern or fsspec URL of .txt, .jsonl, .tsv or .parquet files (.gz too)",
    )
    revision: str = Field("", title="Revision", description="A name for this state of the source, if it has one")
    split: tuple[int, int, int] = Field(
        (950, 30, 20), title="Split", description="Train, validation and test, in thousandths of the documents"
    )
    split_seed: int = Field(0, ge=0, title="Split seed", description="Decides which document falls into which split")
    workers: int | None = Field(None, ge=1, title="Workers", description="Processes; all cores when left out")

    @field_validator("source")
    @classmethod
    def _source_holds_no_secret(cls, source: str) -> str:
        return without_secret("corpus.source", source)

    def split_identity(self) -> dict[str, Any]:
        """What decides which document falls into which split."""
        return {"split": list(self.split), "split_seed": self.split_seed}

    @model_validator(mode="after")
    def _split_is_whole(self) -> Self:
        if sum(self.split) != 1000 or min(self.split) < 0 or self.split[0] == 0 or self.split[1] == 0:
            raise ValueError(
                f"corpus.split is {self.split}: three thousandths that sum to 1000, the first two above zero"
            )
        return self


class TokenizerSpec(SpecPart):
    """Which vocabulary: an existing one, or one trained on the corpus."""

    path: str | None = Field(
        None, title="Path", description="A spiece.model or a Hugging Face folder; trained when left out"
    )
    vocab_size: int = Field(
        32000, ge=300, le=250_000, title="Vocabulary", description="Pieces to train, without the 100 sentinels"
    )
    character_coverage: float = Field(
        0.9995, ge=0.98, le=1.0, title="Character coverage", description="Share of characters with a piece of their own"
    )

    def identity(self) -> dict[str, Any]:
        """With a given vocabulary the training settings have no say; its content is fingerprinted by the stage."""
        return {"given": True} if self.path is not None else super().identity()


class ShardsSpec(SpecPart):
    """How token ids are cut into files."""

    execution = frozenset({"workers"})

    shard_tokens: int = Field(
        128 << 20, ge=4096, le=1 << 31, title="Tokens a shard", description="Aimed at; a shard ends with a document"
    )
    workers: int | None = Field(None, ge=1, title="Workers", description="Processes; all cores when left out")


class ObjectiveSpec(SpecPart):
    """T5 span corruption (Raffel et al. 2020, section 3.1.4)."""

    noise_density: float = Field(0.15, gt=0, lt=0.5, title="Noise density", description="Share of tokens masked")
    mean_span_tokens: float = Field(3.0, ge=1, le=20, title="Mean span", description="Mean length of a masked span")
    input_tokens: int = Field(512, ge=16, le=16384, title="Input tokens", description="Encoder length, EOS included")


PresetName = Literal["smoke", "tiny", "small", "base", "large", "3b", "11b"]


class ModelSpec(SpecPart):
    """A T5 of the v1.0 or v1.1 family; fields left out come from the preset."""

    execution = frozenset({"activation_checkpointing", "compile"})

    preset: PresetName = Field("base", title="Preset", description="Shape of the published T5 of that size")
    version: Literal["v1.1", "v1.0"] = Field(
        "v1.1", title="Version", description="v1.1: gated GELU, untied output; v1.0: ReLU, tied output"
    )
    feed_forward: Literal["gated-gelu", "relu"] | None = Field(
        None, title="Feed-forward", description="Else by version"
    )
    d_model: int | None = Field(None, ge=8, title="d_model", description="Width; else by preset")
    d_kv: int | None = Field(None, ge=4, title="d_kv", description="Width of a head; else by preset")
    d_ff: int | None = Field(None, ge=8, title="d_ff", description="Width of the feed-forward; else by preset")
    num_heads: int | None = Field(None, ge=1, title="Heads", description="Else by preset")
    num_layers: int | None = Field(None, ge=1, title="Encoder layers", description="Else by preset")
    num_decoder_layers: int | None = Field(None, ge=1, title="Decoder layers", description="Else by preset")
    vocab_size: int | None = Field(
        None, ge=128, title="Vocabulary", description="Embedding rows; else the tokenizer's, padded to 128"
    )
    dropout_rate: float = Field(0.0, ge=0, lt=1, title="Dropout", description="0 for pre-training, as T5 v1.1")
    activation_checkpointing: bool = Field(
        False,
        title="Activation checkpointing",
        description="Compute what lies within a block again in the backward pass: less memory, a third more work",
    )
    compile: bool = Field(False, title="Compile", description="torch.compile; worth it on GPUs")
    start_from: str | None = Field(
        None,
        title="Start from",
        description="Folder of a T5 or Switch Transformer in safetensors, or an export of ours, whose weights to "
        "continue from; drawn by seed when left out",
    )
    moe: ExpertsSpec = ExpertsSpec()

    def identity(self) -> dict[str, Any]:
        """A dense model is the same whatever is said of experts.

        The content of a model to continue from is fingerprinted by the stage that trains.
        """
        values = super().identity()
        if not self.moe.num_experts:
            del values["moe"]
        given = {"start_from": "given"} if values.pop("start_from") is not None else {}
        return values | given

    @field_validator("start_from")
    @classmethod
    def _start_is_a_local_folder(cls, folder: str | None) -> str | None:
        if folder is not None and local_folder(folder) is None:
            raise ValueError(
                f"model.start_from is {redacted(folder)}: it must be a folder on this machine; download it there first"
            )
        return folder

    @model_validator(mode="after")
    def _experts_are_those_of_switch_transformers(self) -> Self:
        if self.moe.num_experts and (self.version, self.feed_forward or "relu") != ("v1.0", "relu"):
            raise ValueError(
                f"model.moe.num_experts is {self.moe.num_experts}, model.version {self.version!r} and "
                f"model.feed_forward {self.feed_forward!r}: Switch Transformers have ReLU experts and a tied output; "
                "set model.version=v1.0 and leave model.feed_forward out"
            )
        return self

    @model_validator(mode="after")
    def _vocabulary_is_padded(self) -> Self:
        if self.vocab_size is not None and self.vocab_size % VOCABULARY_MULTIPLE:
            raise ValueError(
                f"model.vocab_size is {self.vocab_size}: it must be a multiple of {VOCABULARY_MULTIPLE} "
                f"(the next is {pad_vocabulary(self.vocab_size)})"
            )
        return self


class OptimizerSpec(SpecPart):
    """How the weights move, and in what arithmetic."""

    kind: Literal["adamw-rms", "adamw"] = Field(
        "adamw-rms", title="Kind", description="adamw-rms scales each tensor's step by its RMS, which T5 needs"
    )
    peak_learning_rate: float = Field(0.01, gt=0, le=1, title="Peak rate", description="Relative to a tensor's RMS")
    warmup_steps: int = Field(1000, ge=0, title="Warm-up steps", description="Linear from zero to the peak")
    schedule: Literal["inverse-sqrt", "cosine", "constant"] = Field(
        "cosine", title="Schedule", description="After the warm-up"
    )
    final_learning_rate: float = Field(1e-5, ge=0, le=1, title="Final rate", description="Where the cosine ends")
    weight_decay: float = Field(0.0, ge=0, le=1, title="Weight decay", description="Decoupled")
    betas: tuple[float, float] = Field((0.9, 0.999), title="Betas", description="Decay of Adam's two moments")
    epsilon: float = Field(1e-8, gt=0, title="Epsilon", description="Adam's")
    gradient_clip: float = Field(1.0, ge=0, title="Gradient clip", description="Global norm; 0 for none")
    global_batch_sequences: int = Field(128, ge=1, title="Global batch", description="Sequences an optimizer step")
    num_steps: int = Field(65536, ge=1, title="Steps", description="Optimizer steps of the run")
    seed: int = Field(0, ge=0, le=2**31 - 1, title="Seed", description="Of weights, order and noise")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "bf16", title="Precision", description="fp16 needs a GPU, or a CPU with instructions for it"
    )
    initial_scale_power: int = Field(16, ge=0, le=32, title="fp16 scale", description="First loss scale, power of two")

    @model_validator(mode="after")
    def _schedule_is_possible(self) -> Self:
        if self.warmup_steps >= self.num_steps:
            raise ValueError(
                f"optimizer.warmup_steps is {self.warmup_steps}: it must be below optimizer.num_steps "
                f"({self.num_steps})"
            )
        if self.final_learning_rate > self.peak_learning_rate:
            raise ValueError(
                f"optimizer.final_learning_rate is {self.final_learning_rate}: it must not exceed "
                f"optimizer.peak_learning_rate ({self.peak_learning_rate})"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas is {self.betas}: both must lie in [0, 1)")
        return self


class LayoutSpec(SpecPart):
    """How the state of training is spread over ranks."""

    execution = frozenset(
        {"zero_stage", "offload", "pin_memory", "pipeline_stages", "expert_parallel_size", "micro_batch_sequences"}
    )

    zero_stage: Literal[0, 1, 2, 3] = Field(
        1, title="ZeRO stage", description="0: replicated, 1: optimizer, 2: and gradients, 3: and parameters are cut up"
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        title="Offload",
        description="To host memory: masters and moments (ZeRO 1 to 3), or these and the parameters (ZeRO 3)",
    )
    pin_memory: bool = Field(
        False, title="Pin memory", description="Offload to page-locked memory: quicker to copy, and never swapped"
    )
    pipeline_stages: int = Field(
        1, ge=1, title="Pipeline stages", description="Ranks over which the layers of each model are spread (ZeRO 1)"
    )
    expert_parallel_size: int = Field(
        1, ge=1, title="Expert parallelism", description="Ranks over which the experts of a layer are spread"
    )
    micro_batch_sequences: int = Field(8, ge=1, title="Micro-batch", description="Sequences a rank, a pass")

    @model_validator(mode="after")
    def _only_what_is_cut_up_is_offloaded(self) -> Self:
        if self.zero_stage < {"none": 0, "optimizer": 1, "all": 3}[self.offload]:
            raise ValueError(
                f"layout.offload is {self.offload!r} and layout.zero_stage {self.zero_stage}: 'optimizer' needs ZeRO 1 "
                "or more, 'all' needs ZeRO 3"
            )
        return self


class StorageSpec(SpecPart):
    """Where things lie, and how often state is saved."""

    execution = frozenset(
        {
            "root",
            "scratch",
            "publish_to",
            "checkpoint_every_steps",
            "keep_last",
            "keep_every_steps",
            "checkpoint_gigabytes",
            "validate_every_steps",
            "validate_sequences",
        }
    )

    root: Path = Field(Path("work"), title="Root", description="Folder that holds everything a run makes")
    scratch: Path | None = Field(
        None,
        title="Scratch",
        description="Folder on each host's own disk, for training on hosts that do not share the root; within "
        "/var/tmp when left out",
    )
    publish_to: str | None = Field(
        None, title="Publish to", description="Folder or fsspec URL; {root}/published/{run} when left out"
    )
    checkpoint_every_steps: int = Field(1000, ge=1, title="Checkpoint every", description="Optimizer steps")
    keep_last: int = Field(2, ge=1, title="Keep", description="Complete checkpoints kept")
    keep_every_steps: int | None = Field(
        None, ge=1, title="Keep every", description="Those of multiples of so many steps are kept, too"
    )
    checkpoint_gigabytes: float | None = Field(
        None,
        gt=0,
        title="Checkpoint gigabytes",
        description="Room for the checkpoints of a run, on each disk that holds any: the oldest go, never the newest",
    )
    validate_every_steps: int = Field(500, ge=1, title="Validate every", description="Optimizer steps")
    validate_sequences: int = Field(512, ge=1, title="Validation", description="Sequences at most, each time")

    @property
    def checkpoint_bytes(self) -> int | None:
        """``checkpoint_gigabytes`` in bytes."""
        return None if self.checkpoint_gigabytes is None else int(self.checkpoint_gigabytes * 1e9)

    @field_validator("root", "scratch")
    @classmethod
    def _root_is_no_pattern(cls, folder: Path | None, info: ValidationInfo) -> Path | None:
        if found := set("*?[") & set(str(folder or "")):
            raise ValueError(
                f"storage.{info.field_name} is {str(folder)!r}: DeepSpeed reads {' '.join(sorted(found))} in it as a "
                "pattern, and finds no checkpoint to resume from; choose another folder"
            )
        return folder

    @field_validator("scratch")
    @classmethod
    def _scratch_is_the_same_place_everywhere(cls, folder: Path | None) -> Path | None:
        if folder is not None and not folder.is_absolute():
            raise ValueError(
                f"storage.scratch is {str(folder)!r}: hosts differ in what it is relative to; make it absolute"
            )
        return folder

    @field_validator("publish_to")
    @classmethod
    def _destination_holds_no_secret(cls, url: str | None) -> str | None:
        return url if url is None else without_secret("storage.publish_to", url)


def pad_vocabulary(pieces: int) -> int:
    """The smallest multiple of 128 that holds ``pieces`` ids."""
    return -(-pieces // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
