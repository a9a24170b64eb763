"""Run nights without any fault, and report how many found something: the rate of false alarms.

    python -m tests.acceptance.regression_quiet [--repeats 10] [--root DIR] [--case smoke moe]

The first night records the baseline and does not count. Nights are kept in DIR, so that an interrupted command
continues. The exit code is 1 if there was a false alarm.
"""

import argparse
import sys
from pathlib import Path

from t5train.regression.night_folders import MAX_NIGHTS, RegressionFolder
from t5train.regression.night_results import RESULTS, NightResult
from t5train.regression.regression_cases import CASES
from tests.acceptance.regression_faults import night


def nights_in(root: Path) -> list[NightResult]:
    return [NightResult.read(folder) for folder in RegressionFolder(root).nights() if (folder / RESULTS).exists()]


def report(root: Path, counted: list[NightResult]) -> str:
    """Return the rate of false alarms, and the range of each quantity relative to the baseline."""
    alarms = [finding.sentence for result in counted for finding in result.findings]
    failed = sum(not result.passed for result in counted)
    changes: dict[tuple[str, str], list[float]] = {}
    for line in RegressionFolder(root).history():
        for name, each in line.compared.items():
            if each.baseline is not None:
                changes.setdefault((line.case, name), []).append(each.tonight / each.baseline - 1)
    ranges = [f"{case}, {name}: {min(all_):+.1%} to {max(all_):+.1%}" for (case, name), all_ in changes.items()]
    return "\n".join([f"{failed} of {len(counted)} clean nights failed", *alarms, *ranges])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, choices=range(1, MAX_NIGHTS), metavar="N")
    parser.add_argument("--root", type=Path, default=Path("work/regression-quiet"))
    parser.add_argument("--case", nargs="+", choices=[case.name for case in CASES], default=["smoke", "moe"])
    options = parser.parse_args()
    root = options.root.absolute()
    root.mkdir(parents=True, exist_ok=True)
    while len(nights_in(root)) <= options.repeats:
        code, result = night(root, options.case, keep=options.repeats + 1)
        print(f"night {result.night}: exit code {code}, {result.seconds:.0f} s", flush=True)
    counted = nights_in(root)[1 : options.repeats + 1]
    print(report(root, counted))
    return 0 if all(result.passed for result in counted) else 1


if __name__ == "__main__":
    sys.exit(main())
