"""Plant faults in the training code, one at a time, and check that the regression finds each.

    python -m tests.acceptance.regression_faults [--root DIR] [--only NAME ...]
        [--into docs/evidence/regression-faults.md]

The first night, without a fault, records the baseline. Then each fault gets a night of the case that can show it; the
night must fail, with a finding about what the fault changes. Outcomes are kept in DIR/faults.jsonl, so that an
interrupted command continues. ``--into`` puts the table into its section of a file. The exit code is 1 if a
fault was not found.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from t5train.regression.night_folders import MAX_NIGHTS, RegressionFolder
from t5train.regression.night_results import NightResult
from tests.acceptance.planted_faults import FAULTS, environment_of
from tests.acceptance.result_table import ResultLines, write_section
from tests.support.hardware import hardware

LONGEST = 220
PROGRAM = (sys.executable, "-c", "from flows.cli.__main__ import main; main()", "regression", "run")


def night(
    root: Path, cases: Sequence[str], environment: dict[str, str] | None = None, *, keep: int = MAX_NIGHTS
) -> tuple[int, NightResult]:
    """Run a night in a new process, and keep this many; return its exit code and results."""
    chosen = [word for case in cases for word in ("--case", case)]
    with open(root / "output.log", "ab") as log:
        command = [*PROGRAM, *chosen, "--root", str(root), "--keep-nights", str(keep)]
        code = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode
    folder = RegressionFolder(root).night(None)
    return code, NightResult.read(folder)


def outcome_of(root: Path, name: str) -> dict[str, Any]:
    """Run a night with a fault; return what it found."""
    fault, started = FAULTS[name], time.monotonic()
    before = RegressionFolder(root).nights()
    code, result = night(root, [fault.case], environment_of(name, root / "planted" / name))
    if RegressionFolder(root).nights() == before:
        raise SystemExit(f"the night with the fault {name} did not begin: read {root / 'output.log'}")
    of_kind = [finding.sentence for finding in result.findings if finding.about == fault.about]
    found = [sentence for sentence in of_kind if fault.says in sentence]
    return {
        "fault": name,
        "caught": code == 1 and bool(found),
        "finding": found[0] if found else "; ".join(finding.sentence for finding in result.findings),
        "seconds": round(time.monotonic() - started),
        "night": result.night,
    }


def table(outcomes: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table, below the date and the machine."""
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {hardware()}.",
        "",
        "| fault | case | caught | finding |",
        "|---|---|---|---|",
    ]
    for each in outcomes:
        fault = FAULTS[each["fault"]]
        caught = "yes" if each["caught"] else "NO"
        lines.append(f"| {fault.what} | {fault.case} | {caught} | {_brief(each['finding'])} |")
    return "\n".join(lines)


def _brief(finding: str) -> str:
    """Return a finding for a cell of the table: without the path of the root, and not too long."""
    text = re.sub(r"/\S*/runs/", "runs/", finding).replace("|", "/")
    return text if len(text) <= LONGEST else text[:LONGEST] + " ..."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("work/regression-faults"))
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--into", type=Path, help="write the table into its section of this file")
    options = parser.parse_args()
    root = options.root.absolute()
    root.mkdir(parents=True, exist_ok=True)
    cases = list(dict.fromkeys(FAULTS[name].case for name in options.only))
    accepted = {baseline.result.case for baseline in RegressionFolder(root).baselines.history()}
    if missing := [case for case in cases if case not in accepted]:
        code, clean = night(root, missing)
        print(f"clean night of {', '.join(missing)}: exit code {code}, {clean.seconds:.0f} s", flush=True)
        if code:
            raise SystemExit(f"the clean night failed: read {root / 'output.log'}")
    record = ResultLines(root / "faults.jsonl")
    done = {each["fault"]: each for each in record.rows()}
    for name in options.only:
        if name not in done:
            done[name] = outcome_of(root, name)
            record.append(done[name])
        print(json.dumps(done[name]), flush=True)
    shown = [done[name] for name in options.only]
    print(table(shown))
    if options.into:
        write_section(options.into, "tests/acceptance/regression_faults.py", table(shown))
    return 0 if all(each["caught"] for each in shown) else 1


if __name__ == "__main__":
    sys.exit(main())
