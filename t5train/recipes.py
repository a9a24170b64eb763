"""Named RunSpecs. A recipe is a function that returns a whole spec; nothing is inherited behind its back."""

from collections.abc import Callable

from t5train.errors import SpecError
from t5train.spec import (
    ClusterSpec,
    ExpertsSpec,
    LayoutSpec,
    ModelSpec,
    ObjectiveSpec,
    OptimizerSpec,
    RunSpec,
    ShardsSpec,
    StorageSpec,
    TokenizerSpec,
    nearest,
)


def smoke() -> RunSpec:
    """The whole chain in minutes on two CPU ranks: Python's documentation, a very small T5, ZeRO-1, fp32."""
    return RunSpec(
        recipe="smoke",
        tokenizer=TokenizerSpec(vocab_size=2000),
        shards=ShardsSpec(shard_tokens=100_000),
        objective=ObjectiveSpec(input_tokens=64),
        model=ModelSpec(preset="smoke"),
        optimizer=OptimizerSpec(
            peak_learning_rate=0.02,
            warmup_steps=40,
            final_learning_rate=0.001,
            global_batch_sequences=64,
            num_steps=400,
            precision="fp32",
        ),
        layout=LayoutSpec(zero_stage=1, micro_batch_sequences=32),
        storage=StorageSpec(checkpoint_every_steps=100, validate_every_steps=100, validate_sequences=128),
        cluster=ClusterSpec(ranks=2, accelerator="cpu"),
    )


def small() -> RunSpec:
    """T5 v1.1 small on one GPU: bf16, ZeRO-2. Give it your own text with corpus.source."""
    return RunSpec(
        recipe="small",
        model=ModelSpec(preset="small", compile=True),
        layout=LayoutSpec(zero_stage=2, micro_batch_sequences=128),
    )


def base() -> RunSpec:
    """T5 v1.1 base on one GPU, as nanoT5 sets it: bf16, ZeRO-2, batch 128, 65,536 steps, cosine."""
    return RunSpec(
        recipe="base",
        model=ModelSpec(preset="base", compile=True),
        optimizer=OptimizerSpec(warmup_steps=10_000, peak_learning_rate=0.02),
        layout=LayoutSpec(zero_stage=2, micro_batch_sequences=128),
    )


def moe() -> RunSpec:
    """Switch Transformer of base shape with 8 experts on one GPU: bf16, ZeRO-2. More GPUs share the experts out."""
    return RunSpec(
        recipe="moe",
        model=ModelSpec(preset="base", version="v1.0", moe=ExpertsSpec(num_experts=8)),
        optimizer=OptimizerSpec(warmup_steps=10_000, peak_learning_rate=0.02),
        layout=LayoutSpec(zero_stage=2, micro_batch_sequences=64),
    )


RECIPES: dict[str, Callable[[], RunSpec]] = {recipe.__name__: recipe for recipe in (smoke, small, base, moe)}


def recipe(name: str) -> RunSpec:
    """The spec of a recipe; SpecError names the nearest one for an unknown name."""
    if name not in RECIPES:
        raise SpecError(f"unknown recipe {name!r}{nearest(name, list(RECIPES))}; there are {', '.join(RECIPES)}")
    return RECIPES[name]()
