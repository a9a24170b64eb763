"""What counts as worse, and the sentence that says so."""

import math
from typing import Any

import pytest

from t5train.regression.night_results import CaseResult, Measured, Point
from t5train.regression.regression_findings import (
    ACCELERATOR_MEMORY,
    HOST_MEMORY,
    PEER,
    SAVING,
    STEP,
    STEP_CPU,
    VALIDATION,
    allowed_growth,
    compare,
    compared,
    disagreements,
    unsteady,
)
from tests.support.night_cases import CURVE, MACHINE, case_result, measured, memory

OLD, NEW = MACHINE | {"torch": "2.12.0"}, MACHINE | {"torch": "2.13.0"}


def sentences(tonight: CaseResult, baseline: CaseResult | None = None) -> list[str]:
    return [finding.sentence for finding in compare(tonight, baseline or case_result())]


def with_measured(name: str, values: Measured) -> CaseResult:
    return case_result(measured={**case_result().measured, name: values})


def test_no_change_growth_up_to_the_minimum_and_any_improvement_are_no_findings() -> None:
    assert sentences(case_result()) == []
    assert sentences(with_measured(STEP, measured(1.8))) == []  # 12.5% above 1.60
    assert sentences(with_measured(STEP, measured(0.5))) == []
    [said] = sentences(with_measured(STEP, measured(2.1, 2.1, 2.1)))
    assert said == "moe: a step takes 2.10 times the peer's, 31% above the baseline's 1.60; allowed 15%"


@pytest.mark.parametrize(
    ("name", "before", "tonight", "expected"),
    [
        (STEP_CPU, measured(1.0), measured(1.3), "a step takes 1.30 times the CPU time of the peer's, 30% above"),
        ("export", measured(10.0), measured(20.0), "export takes the CPU time of 20.00 steps of the peer, 100% above"),
        ("export, wall", measured(10.0), measured(20.0), "export takes as long as 20.00 steps of the peer, 100% above"),
        ("sharding", measured(10.0), measured(20.0), "sharding takes the CPU time of 20.00 steps of the peer, 100%"),
        (SAVING, measured(5.0), measured(80.0), "saving a checkpoint takes as long as 80.00 steps of the peer, 1500%"),
        (VALIDATION, measured(2.0), measured(4.0), "a validation takes as long as 4.00 steps of the peer, 100% above"),
        (PEER, measured(1.0), measured(2.0), "a step of the peer, which uses no code of this project, takes the CPU"),
        (HOST_MEMORY, memory(450e6), memory(540e6), "a rank's peak host memory is 540.0 MB, 20% above the baseline's"),
        (ACCELERATOR_MEMORY, memory(1e9), memory(2e9), "a rank's peak memory on its accelerator is 2.0 GB, 100% above"),
    ],
)
def test_each_quantity_has_its_sentence(name: str, before: Measured, tonight: Measured, expected: str) -> None:
    [said] = sentences(with_measured(name, tonight), with_measured(name, before))
    assert said.startswith(f"moe: {expected}")


def test_a_quantity_of_the_baseline_that_was_not_measured_is_a_finding() -> None:
    before = with_measured(SAVING, measured(5.0))
    [said] = sentences(case_result(), before)
    assert said == "moe: saving is in the baseline, but was not measured, so it was not checked"
    assert sentences(before, case_result()) == []


@pytest.mark.parametrize(
    ("tonight", "baseline", "allowed"),
    [
        (measured(1.0, 1.0), measured(1.0, 1.0), 0.15),
        (measured(0.9, 1.0, 1.1), measured(1.0, 1.0), 0.3),
        (measured(1.0, 1.0), measured(0.8, 1.0, 1.2), 0.6),
    ],
)
def test_noisy_repeats_tonight_or_in_the_baseline_allow_more(
    tonight: Measured, baseline: Measured, allowed: float
) -> None:
    assert allowed_growth(tonight, baseline) == pytest.approx(allowed)


def changed(label: str, factor: float) -> list[Point]:
    return [(name, loss * factor if name == label else loss) for name, loss in CURVE]


def test_a_changed_loss_is_reported_with_the_first_step_that_changed() -> None:
    curve = [CURVE[0], *changed("loss of step 2", 1.01)[1:2], ("validation loss after step 2", 6.6)]
    [said] = sentences(case_result(curves=[curve, curve]))
    assert said == (
        "moe: the loss of step 2 is 6.312500, but 6.250000 in the baseline: they differ by 1.0e-02, later losses by up "
        "to 1.0e-01; allowed 1e-05"
    )


@pytest.mark.parametrize("factor", [1 + 5e-5, 1 - 5e-5, math.nan])
def test_a_loss_may_change_in_neither_direction(factor: float) -> None:
    curve = changed("validation loss after step 2", factor)
    assert len(sentences(case_result(curves=[curve, curve]))) == 1
    assert sentences(case_result(curves=[changed("loss of step 2", 1 + 5e-6)])) == [], "that is rounding"


def test_a_missing_validation_is_a_finding() -> None:
    [said] = sentences(case_result(curves=[CURVE[:2]]))
    assert "the validation loss after step 2 is missing" in said


@pytest.mark.parametrize(
    ("device", "before", "factor", "found"),
    [
        *[("cpu", NEW, 1.001, 1), ("cuda", NEW, 1.001, 0)],
        # An upgrade may round losses otherwise, but not change them. Accelerators vary more in any night.
        *[("cpu", OLD, factor, 0) for factor in (1 + 1e-6, 1 - 1e-4)],
        *[("cpu", OLD, factor, 1) for factor in (1.006, 0.994)],
        ("cuda", OLD, 1.005, 0),
    ],
)
def test_losses_may_vary_more_on_accelerators_and_after_an_upgrade(
    device: str, before: dict[str, str], factor: float, found: int
) -> None:
    tonight = case_result(machine=NEW, curves=[changed("loss of step 2", factor)], device=device)
    assert len(sentences(tonight, case_result(machine=before, device=device))) == found


@pytest.mark.parametrize("machine", [OLD, NEW])
def test_doubled_losses_times_and_memory_are_found_also_after_an_upgrade(machine: dict[str, str]) -> None:
    doubled = case_result(
        machine=machine,
        curves=[[(label, 2 * loss) for label, loss in CURVE]],
        measured={STEP: measured(3.2), SAVING: measured(10.0), HOST_MEMORY: memory(900e6)},
    )
    before = {STEP: measured(1.6), SAVING: measured(5.0), HOST_MEMORY: memory(450e6)}
    found = compare(doubled, case_result(machine=OLD, measured=before))
    assert [finding.about for finding in found] == ["loss", "time", "time", "memory"]
    named = [finding.sentence.endswith(" (torch 2.12.0 -> 2.13.0)") for finding in found]
    assert named == [machine == NEW] * 4


def test_repeats_that_differ_too_much_tonight_or_in_the_baseline_are_a_finding() -> None:
    noisy, quiet = with_measured(STEP, measured(1.0, 1.1, 5.5)), with_measured(STEP, measured(1.1))
    [finding] = compare(noisy, None)
    assert (finding.about, finding.sentence) == (
        "time",
        "moe: step varies from 1.00 to 5.50 between repeats, so that growth by 614% would be allowed; a check needs "
        "less than 100%. Run the night again while the machine does nothing else",
    )
    assert compare(with_measured(STEP, measured(1.0, 1.1, 1.6)), None) == []
    [said] = sentences(noisy, quiet)
    assert said.endswith("Run the night again while the machine does nothing else")
    [said] = sentences(quiet, noisy)
    assert said.startswith("moe: in the baseline, step varies from 1.00 to 5.50")
    assert said.endswith("Accept a night on a quiet machine (`regression accept`)")


def test_losses_that_vary_too_much_on_accelerators_are_a_finding() -> None:
    result = case_result(curves=[CURVE, changed("loss of step 2", 1.1)], device="cuda")
    [said] = sentences(result, case_result(device="cuda"))
    assert "losses vary between repeats, so that a change by 1e-01 would be allowed" in said


def test_the_widest_check_still_finds_a_doubled_time() -> None:
    widest = measured(1.0, 1.0, 1.66)
    doubled = measured(*(2 * value for value in widest.values))
    assert unsteady(with_measured(STEP, widest)) == []
    assert len(sentences(with_measured(STEP, doubled), with_measured(STEP, widest))) == 1


def test_changed_settings_are_a_finding_and_not_a_new_baseline() -> None:
    [said] = sentences(case_result(settings={"optimizer": {"peak_learning_rate": 0.04}}))
    assert said == "moe: the settings are not the baseline's: optimizer.peak_learning_rate: 0.02 -> 0.04"


def test_a_failure_is_a_finding_without_a_baseline() -> None:
    failed = case_result(problems=["export failed: no space"], curves=[], measured={})
    assert [finding.sentence for finding in compare(failed, None)] == ["moe: export failed: no space"]


def test_layouts_of_one_model_may_differ_by_rounding_only() -> None:
    def variant(case: str, loss: float, **changes: Any) -> CaseResult:
        return case_result(case, curves=[[("loss of step 1", loss)]], **changes)

    smoke, other_model = variant("smoke", 6.0, same_model="dense"), variant("moe", 7.0)
    rounded, changed = (variant("zero3", 6.0 * factor, same_model="dense") for factor in (1 + 1e-6, 1 + 4e-6))
    assert list(disagreements([smoke, rounded, other_model])) == []
    [finding] = disagreements([smoke, changed, other_model])
    assert finding.case == "zero3"
    assert finding.sentence == (
        "zero3: the loss of step 1 is 6.000024, but 6.000000 in smoke, which trains the same model: they differ by "
        "4.0e-06; allowed 2e-06"
    )


def test_quantities_without_a_baseline_are_shown_without_one() -> None:
    assert compared(case_result(), None)[STEP].baseline is None
    assert compared(case_result(), case_result())[STEP].baseline == 1.6
