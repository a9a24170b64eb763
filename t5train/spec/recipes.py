"""Named RunSpecs. A recipe is a function that returns a complete spec; nothing is inherited implicitly."""

from collections.abc import Callable, Mapping
from typing import Any

from t5train.errors import SpecError
from t5train.spec import (
    ClusterSpec,
    EvaluateSpec,
    ExpertsSpec,
    LayoutSpec,
    ModelSpec,
    ObjectiveSpec,
    OptimizerSpec,
    PairsSpec,
    RunSpec,
    ShardsSpec,
    StorageSpec,
    TokenizerSpec,
    nearest,
)
from t5train.spec.pairs_spec import GENERATED


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


def large() -> RunSpec:
    """T5 v1.1 large on one GPU with 80 GB: bf16, ZeRO-2, two passes a step."""
    return RunSpec(
        recipe="large",
        model=ModelSpec(preset="large", compile=True),
        optimizer=OptimizerSpec(warmup_steps=10_000),
        # 43 GiB were measured with 64 sequences a pass, of which 13 are state (see memory_estimate). 128 would need 73,
        # and the global batch has no divisor between them.
        layout=LayoutSpec(zero_stage=2, micro_batch_sequences=64),
    )


def moe() -> RunSpec:
    """Switch Transformer of base shape with 8 experts on one GPU: bf16, ZeRO-2. Each GPU holds all experts."""
    return RunSpec(
        recipe="moe",
        model=ModelSpec(preset="base", version="v1.0", compile=True, moe=ExpertsSpec(num_experts=8)),
        optimizer=OptimizerSpec(warmup_steps=10_000, peak_learning_rate=0.02),
        layout=LayoutSpec(zero_stage=2, micro_batch_sequences=64),
    )


def pipeline() -> RunSpec:
    """T5 v1.1 base in a pipeline of two stages, one per GPU: bf16, ZeRO-1. More GPUs run more pipelines."""
    return RunSpec(
        recipe="pipeline",
        model=ModelSpec(preset="base", compile=True),
        optimizer=OptimizerSpec(warmup_steps=10_000, peak_learning_rate=0.02),
        # With eight passes per step, each stage is idle for a ninth of the time.
        layout=LayoutSpec(zero_stage=1, pipeline_stages=2, micro_batch_sequences=16),
        cluster=ClusterSpec(ranks=2),
    )


def zero1_offload() -> RunSpec:
    """T5 v1.1 base, masters and moments partitioned over GPUs (ZeRO-1) and kept in page-locked host memory."""
    return RunSpec(
        recipe="zero1_offload",
        model=ModelSpec(preset="base", compile=True),
        optimizer=OptimizerSpec(warmup_steps=10_000, peak_learning_rate=0.02),
        layout=LayoutSpec(zero_stage=1, offload="optimizer", pin_memory=True, micro_batch_sequences=128),
    )


def zero2_offload() -> RunSpec:
    """T5 v1.1 base, gradients partitioned over GPUs too (ZeRO-2), masters and moments in page-locked host memory."""
    return RunSpec(
        recipe="zero2_offload",
        model=ModelSpec(preset="base", compile=True),
        optimizer=OptimizerSpec(warmup_steps=10_000, peak_learning_rate=0.02),
        layout=LayoutSpec(zero_stage=2, offload="optimizer", pin_memory=True, micro_batch_sequences=128),
    )


def zero3() -> RunSpec:
    """T5 v1.1 base, all partitioned over GPUs (ZeRO-3); parameters, masters and moments in page-locked host memory."""
    return RunSpec(
        recipe="zero3",
        model=ModelSpec(preset="base", compile=True),
        optimizer=OptimizerSpec(warmup_steps=10_000, peak_learning_rate=0.02),
        layout=LayoutSpec(zero_stage=3, offload="all", pin_memory=True, micro_batch_sequences=64),
    )


def t5_3b() -> RunSpec:
    """T5 v1.1 3B on GPUs with 80 GB each, one or several: bf16, ZeRO-1, nothing in host memory."""
    return RunSpec(
        recipe="t5_3b",
        model=ModelSpec(preset="3b", compile=True),
        optimizer=OptimizerSpec(warmup_steps=10_000),
        # ZeRO-2 would reduce the gradients of every pass; here, they are reduced once a step. 32 sequences a pass take
        # more than 80 GB.
        layout=LayoutSpec(zero_stage=1, micro_batch_sequences=16),
    )


def t5_3b_one_gpu() -> RunSpec:
    """T5 v1.1 3B on one GPU with 40 GB, in a host with 128 GB: ZeRO-3, all state in host memory."""
    return RunSpec(
        recipe="t5_3b_one_gpu",
        model=ModelSpec(preset="3b", compile=True, activation_checkpointing=True),
        optimizer=OptimizerSpec(warmup_steps=10_000),
        # One pass per step, because each pass fetches every parameter. Not page-locked, because page-locked buffers are
        # rounded up to powers of two.
        layout=LayoutSpec(zero_stage=3, offload="all", micro_batch_sequences=128),
    )


def t5_11b_one_gpu() -> RunSpec:
    """T5 v1.1 11B on one GPU with 80 GB, in a host with 320 GB: ZeRO-3, all state in host memory."""
    return RunSpec(
        recipe="t5_11b_one_gpu",
        model=ModelSpec(preset="11b", activation_checkpointing=True),
        optimizer=OptimizerSpec(warmup_steps=10_000),
        layout=LayoutSpec(zero_stage=3, offload="all", micro_batch_sequences=64),
    )


def reverse_and_sort() -> RunSpec:
    """Fine-tuning in minutes on two CPU ranks: a very small T5 learns two tasks on digits, ZeRO-1, fp32."""
    return RunSpec(
        recipe="reverse_and_sort",
        # Packed, 8 rows hold about as many pairs as the batch of 64 with which these settings were measured.
        pairs=PairsSpec(train=tuple(GENERATED), input_tokens=128, target_tokens=64),
        # All that digits between spaces give: each digit and letter, and each digit with the space before it.
        tokenizer=TokenizerSpec(vocab_size=31, character_coverage=1.0),
        model=ModelSpec(
            feed_forward="gated-gelu",
            version="v1.0",
            d_model=64,
            d_kv=32,
            d_ff=128,
            num_heads=2,
            num_layers=2,
            num_decoder_layers=2,
        ),
        optimizer=OptimizerSpec(
            peak_learning_rate=0.03,
            warmup_steps=100,
            schedule="linear",
            final_learning_rate=0.0,
            global_batch_sequences=8,
            num_steps=1000,
            precision="fp32",
        ),
        evaluate=EvaluateSpec(max_pairs=200),
        layout=LayoutSpec(zero_stage=1, micro_batch_sequences=4),
        storage=StorageSpec(checkpoint_every_steps=250, validate_every_steps=250, validate_sequences=512),
        cluster=ClusterSpec(ranks=2, accelerator="cpu"),
    )


def finetune_base() -> RunSpec:
    """T5 base on pairs, from the model in model.start_from, on one GPU: bf16, ZeRO-2, dropout 0.1, constant rate."""
    return RunSpec(
        recipe="finetune_base",
        pairs=PairsSpec(train=tuple(GENERATED)),
        model=ModelSpec(preset="base", dropout_rate=0.1, compile=True),
        optimizer=OptimizerSpec(
            peak_learning_rate=0.001,
            warmup_steps=100,
            schedule="constant",
            final_learning_rate=0.001,
            num_steps=10_000,
        ),
        layout=LayoutSpec(zero_stage=2, micro_batch_sequences=64),
    )


_TRANSLATION = OptimizerSpec(
    peak_learning_rate=0.001,
    warmup_steps=100,
    schedule="constant",
    final_learning_rate=0.001,
    label_smoothing=0.1,
    num_steps=4000,
)
_BEST_TRANSLATION = EvaluateSpec(best_metric="validation_token_accuracy")
# A checkpoint of 3B takes 40 GB and one of 11B 134 GB. Kept are the best, the newest, and the one being written.
_LARGE_CHECKPOINTS = StorageSpec(keep_last=1, validate_sequences=2000)


def translate_3b() -> RunSpec:
    """T5 3B translates, from the model in model.start_from, on two GPUs with 80 GB: bf16, ZeRO-1, dropout 0.1."""
    return RunSpec(
        recipe="translate_3b",
        pairs=PairsSpec(train=tuple(GENERATED)),
        model=ModelSpec(preset="3b", dropout_rate=0.1, compile=True),
        optimizer=_TRANSLATION,
        evaluate=_BEST_TRANSLATION,
        layout=LayoutSpec(zero_stage=1, micro_batch_sequences=16),
        storage=_LARGE_CHECKPOINTS,
        cluster=ClusterSpec(ranks=2),
    )


def translate_3b_one_gpu() -> RunSpec:
    """T5 3B translates, on one GPU with 80 GB in a host with 128 GB: ZeRO-3, all state in host memory."""
    return RunSpec(
        recipe="translate_3b_one_gpu",
        pairs=PairsSpec(train=tuple(GENERATED)),
        model=ModelSpec(preset="3b", dropout_rate=0.1, compile=True, activation_checkpointing=True),
        optimizer=_TRANSLATION,
        evaluate=_BEST_TRANSLATION,
        layout=LayoutSpec(zero_stage=3, offload="all", micro_batch_sequences=128),
        storage=_LARGE_CHECKPOINTS,
    )


def translate_11b_one_gpu() -> RunSpec:
    """T5 11B translates, on one GPU with 80 GB in a host with 320 GB: ZeRO-3, all state in host memory."""
    return RunSpec(
        recipe="translate_11b_one_gpu",
        pairs=PairsSpec(train=tuple(GENERATED)),
        model=ModelSpec(preset="11b", dropout_rate=0.1, activation_checkpointing=True),
        optimizer=_TRANSLATION,
        evaluate=_BEST_TRANSLATION,
        layout=LayoutSpec(zero_stage=3, offload="all", micro_batch_sequences=64),
        storage=_LARGE_CHECKPOINTS,
    )


_ALL = (
    smoke, small, base, large, moe, pipeline, zero1_offload, zero2_offload, zero3, t5_3b, t5_3b_one_gpu, t5_11b_one_gpu,
    reverse_and_sort, finetune_base, translate_3b, translate_3b_one_gpu, translate_11b_one_gpu,
)  # fmt: skip
RECIPES: dict[str, Callable[[], RunSpec]] = {recipe.__name__: recipe for recipe in _ALL}


def summary(name: str) -> str:
    """Return what a recipe is, in one line."""
    return (RECIPES[name].__doc__ or "").splitlines()[0]


TRIAL_STEPS = 50
"""In so few steps, no model learns more than which tokens are frequent."""


def trial_settings(recipe: str, *, own_pairs: bool = False) -> dict[str, Any]:
    """Return settings that turn a recipe into a trial of its layout, which takes minutes on two CPU ranks.

    A tiny model is trained for a few steps on Python's documentation, or on the built-in pairs if the recipe is for
    pairs, with the recipe's precision, ZeRO stage, offload, experts, pipeline stages and dropout. With ``own_pairs``,
    the user names others, which have more characters than digits and need a larger vocabulary.
    """
    return _tiny() | (_tiny_pairs(own_pairs) if RECIPES[recipe]().is_fine_tuning else _tiny_text())


def _tiny_text() -> dict[str, Any]:
    smallest = smoke()
    return {
        "corpus.source": smallest.corpus.source,
        "tokenizer.vocab_size": smallest.tokenizer.vocab_size,
        "shards.shard_tokens": smallest.shards.shard_tokens,
        "objective.input_tokens": smallest.objective.input_tokens,
    }


def _tiny_pairs(own_pairs: bool) -> dict[str, Any]:
    smallest = reverse_and_sort()
    tokenizer = smoke().tokenizer if own_pairs else smallest.tokenizer
    return {
        "pairs.train": list(smallest.pairs.train),
        "pairs.input_tokens": smallest.pairs.input_tokens,
        "pairs.target_tokens": smallest.pairs.target_tokens,
        "tokenizer.vocab_size": tokenizer.vocab_size,
        "tokenizer.character_coverage": tokenizer.character_coverage,
        "model.start_from": None,
        "evaluate.max_pairs": 64,
    }


def _tiny() -> dict[str, Any]:
    return {
        "model.preset": smoke().model.preset,
        "model.compile": False,
        "optimizer.warmup_steps": 10,
        "optimizer.num_steps": TRIAL_STEPS,
        "optimizer.global_batch_sequences": 16,
        "layout.micro_batch_sequences": 4,
        "layout.pin_memory": False,
        "storage.checkpoint_every_steps": 25,
        "storage.validate_every_steps": 25,
        "storage.validate_sequences": 64,
        "cluster.ranks": 2,
        "cluster.accelerator": "cpu",
    }


def unknown_recipe(name: str) -> str:
    """Return that there is no such recipe, and which there are."""
    return f"unknown recipe {name!r}{nearest(name, list(RECIPES))}; choose one of {', '.join(RECIPES)}"


def recipe(name: str, settings: Mapping[str, Any] | None = None) -> RunSpec:
    """Return the spec of a recipe, with some settings changed.

    Args:
        name: One of ``RECIPES``.
        settings: Changes as ``{"part.key": value}``, such as ``{"optimizer.num_steps": 60}``. A value can also be text
            in JSON.

    Returns:
        The whole spec, validated.

    Raises:
        SpecError: The recipe or a setting is unknown (the error names the nearest one), or settings contradict each
            other (the error lists all problems).

    """
    if name not in RECIPES:
        raise SpecError(unknown_recipe(name))
    spec = RECIPES[name]()
    return spec.with_settings(settings) if settings else spec
