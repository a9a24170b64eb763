"""Made-up results of a regression night."""

from typing import Any

from t5train.regression.night_results import CaseResult, Finding, Measured, NightResult, Point
from t5train.regression.regression_findings import HOST_MEMORY, STEP, compared

NIGHT = "20261123-021500"
MACHINE = {"processor": "made up", "ranks": "2"}
CURVE: list[Point] = [("loss of step 1", 6.5), ("loss of step 2", 6.25), ("validation loss after step 2", 6.0)]


def measured(*values: float, minimum: float = 0.15) -> Measured:
    return Measured(unit="peer", minimum=minimum, values=list(values))


def memory(*values: float) -> Measured:
    return Measured(unit="bytes", minimum=0.1, values=list(values))


def case_result(case: str = "moe", **changes: Any) -> CaseResult:
    facts: dict[str, Any] = {
        "case": case,
        "machine": MACHINE,
        "settings": {"optimizer": {"peak_learning_rate": 0.02}},
        "same_model": None,
        "device": "cpu",
        "curves": [CURVE, CURVE],
        "measured": {STEP: measured(1.6, 1.62, 1.58), HOST_MEMORY: memory(450e6, 450e6)},
        "problems": [],
        "seconds": 60.0,
    }
    return CaseResult(**facts | changes)


def night_result(*results: CaseResult, night: str = NIGHT, findings: tuple[Finding, ...] = ()) -> NightResult:
    return NightResult(
        night=night,
        git_commit="c" * 40,
        seconds=100.0,
        results=list(results),
        compared={result.case: compared(result, result) for result in results},
        findings=list(findings),
        notes=[],
    )
