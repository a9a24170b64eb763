"""Every way in which a run over hosts that share nothing goes on, done for real: the table in docs/resumes.md.

::

    python -m tests.acceptance.resume_table --into docs/resumes.md   all of it, as root; 15 minutes on two cores
    python -m tests.acceptance.resume_table --only "clock skew"
"""

import argparse
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.testcluster.host_files import ROOT
from tests.acceptance.fault_table import write_table
from tests.acceptance.resume_cases import CASES, Case
from tests.support.apart_runs import SECONDS, Apart, Files, apart, interrupt, require_success
from tests.support.cluster_runs import Ended, Started, weights

_SAID = re.compile(r"passed over|takes its place|still at work")
_BY_PREFECT = re.compile(r"^[0-9:.]+ \| .*? run '[^']*' - ")
_LONGEST_SAID = 400
_HEADER = """\
| what happened | what the command said | resumed from | brought of that | exit code | bit-equal |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    case: Case
    notes: list[str]
    said: list[str]
    resumed_from: list[str]
    """The tag of each start, the first excepted."""
    brought: str
    exit_code: int
    """Of the last one."""
    is_equal: bool

    def row(self) -> str:
        """A line of the table."""
        what = f"{self.case.what}: {'; '.join(self.notes)}" if any(self.notes) else self.case.what
        said = " / ".join(dict.fromkeys(self.said)).replace(ROOT, "{root}").replace("|", "\\|")
        tags = ", ".join(tag.replace("step-000000", "step ") for tag in self.resumed_from)
        return f"| {what} | {said} | {tags} | {self.brought} | {self.exit_code} | {'yes' if self.is_equal else 'NO'} |"


def _row(it: Apart, case: Case, undisturbed: Any) -> str:
    """What came of a case; also of one that could not be done to its end."""
    try:
        return do(it, case, undisturbed).row()
    except (AssertionError, subprocess.TimeoutExpired) as error:
        said = " ".join(str(error).split())[-_LONGEST_SAID:].replace("|", "\\|")
        return f"| {case.what} | {said} | | | | NO |"


def do(it: Apart, case: Case, undisturbed: Any) -> Outcome:
    """From the interrupted run on, to its end."""
    it.put_disks_back()
    case.harm(it)
    before, notes, said = it.files(), list[str](), list[str]()
    for strike in case.strikes:
        before = it.files()
        run = it.start(case.command, case.options)
        notes.append(strike(it, run))
        said += _said(ended := run.wait(SECONDS))
    case.mend(it)
    if not it.is_over:
        before = it.files()
        said += _said(ended := it.start(case.command, case.options).wait(SECONDS))
    equal = it.is_over and weights(it.folder()) == undisturbed
    tags = it.resumed_from()[1:]
    return Outcome(case, notes, said, tags, _brought(before, it.files(), tags[-1:]), ended.exit_code, equal)


def _said(ended: Ended) -> list[str]:
    """What it said of its choice, and of its failure."""
    lines = [_BY_PREFECT.sub("", line) for line in ended.output.splitlines() if _SAID.search(line)]
    if ended.exit_code and ended.told.startswith("error: "):
        lines.append(ended.told)
    return [" ".join(line.split())[:_LONGEST_SAID] for line in lines]


def _brought(before: Files, after: Files, tags: list[str]) -> str:
    """How many files of the checkpoint came to whom. A tag that was not there before, nodes have written themselves."""
    new = [key for key, inode in after.items() if key[1] in tags and before.get(key) != inode]
    known = {tag for _, tag, _ in before}
    count = Counter(host for host, tag, _ in new if host == "head" or tag in known)
    return ", ".join(f"{number} files to {host}" for host, number in count.items()) or "nothing"


def undisturbed_weights(it: Apart) -> Any:
    """Digests of the weights with which a run ends to which nothing happens. AssertionError if it fails."""
    run: Started = it.start(name="undisturbed")
    require_success(run.wait(SECONDS))
    return weights(it.folder("undisturbed"))


def main() -> None:
    """Do all or one, and write the table as far as it has come after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[case.what for case in CASES])
    parser.add_argument("--into", type=Path, help="document whose table is replaced")
    chosen = parser.parse_args()
    rows = list[str]()
    with apart() as it:
        undisturbed = undisturbed_weights(it)
        interrupt(it)
        it.keep_disks()
        for case in CASES:
            if chosen.only in {None, case.what}:
                rows.append(_row(it, case, undisturbed))
                print(rows[-1], flush=True)
                if chosen.into:
                    write_table(chosen.into, _HEADER, rows)


if __name__ == "__main__":
    main()
