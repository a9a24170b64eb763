"""A benchmark of training steps, and how it sorts kernels."""

import pytest

from infra.head import benchmark_run
from infra.head.benchmark_run import benchmark
from t5train.data.samples.span_corruption import geometry
from t5train.errors import RankStopped, SpecError
from t5train.progress import silent
from t5train.spec.recipes import recipe
from t5train.train.step_benchmark import OTHER, BenchmarkJob, kind_of


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_steps_of_real_ranks_are_measured() -> None:
    spec = recipe("smoke").with_settings({"model.num_layers": 1, "model.num_decoder_layers": 1})
    told: list[tuple[str, int, int | None]] = []
    measured = benchmark(spec, 3, lambda *report: told.append(report))
    assert len(measured.step_seconds) == 3
    assert told[0] == ("steps, taking the first step", 0, 5 + 3 + 2)
    assert 0 < told[-1][1] <= 10
    sample = geometry(spec.objective)
    assert measured.tokens_a_step == 64 * (sample.input_tokens + sample.target_tokens)
    assert measured.memory_bytes > 100e6
    assert measured.device == "CPU"
    assert measured.seconds_by_kind["matrix products"] > 0
    assert measured.seconds_by_kind["optimizer update"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_ranks_of_a_benchmark_report_their_phases_and_one_that_takes_too_long_is_ended() -> None:
    # The first step has a thousand passes, so its end does not come before a look of the guard, which takes a second.
    long = {"optimizer.global_batch_sequences": 1000 * recipe("smoke").layout.micro_batch_sequences}
    spec = recipe("smoke").with_settings({"cluster.ranks": 1, "cluster.deadlines.compile_seconds": 0.01, **long})
    with pytest.raises(RankStopped, match=r"phase 'compile' of step [01] took .*its deadline is 0 s"):
        benchmark(spec, 3, silent)


def test_progress_says_what_ranks_do_before_between_and_after_the_steps() -> None:
    job = BenchmarkJob(spec=recipe("base"), vocab_size=300, steps=3)
    compiling = "steps, compiling the model and taking the first step"
    expected = {0: compiling, 1: "steps", 9: "steps", 10: "steps, reading the profile of the last ones"}
    assert {taken: benchmark_run._doing(job, taken) for taken in expected} == expected


def test_a_recipe_that_this_machine_cannot_train_is_refused() -> None:
    many = {"cluster.accelerator": "cuda", "cluster.ranks": 4096, "optimizer.global_batch_sequences": 32 * 4096}
    spec = recipe("smoke").with_settings(many)
    with pytest.raises(SpecError, match=r"cluster\.ranks is 4096"):
        benchmark(spec, 3, silent)


def test_kernels_are_sorted_by_what_they_do() -> None:
    kernels = {
        "matrix products": ["nvjet_sm90_tst_256x128_NNT", "void cublasLt::splitKreduce_kernel<32, 16, int, float>"],
        "attention": ["queries_forward", "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16"],
        "optimizer update": ["update_chunks"],
        "communication": ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL"],
        "norms, activations, loss": ["triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_6", "gelu_backward"],
        "copies": ["Memset (Device)"],
        OTHER: ["something_else"],
    }
    assert {kind: [*map(kind_of, names)] for kind, names in kernels.items()} == {
        kind: [kind] * len(names) for kind, names in kernels.items()
    }
