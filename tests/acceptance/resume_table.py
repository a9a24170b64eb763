"""Resume a run without a shared root after every kind of damage, and write the table in docs/evidence/resumes.md.

::

    python -m tests.acceptance.resume_table --into docs/evidence/resumes.md  all cases, as root; 15 minutes on two cores
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
from tests.acceptance.result_table import write_table
from tests.acceptance.resume_cases import CASES, Case
from tests.support.cluster_runs import Ended, Started, weights
from tests.support.unshared_runs import SECONDS, Files, UnsharedHosts, interrupt, require_success, unshared_hosts

_MESSAGES = re.compile(r"skipping|takes its place|still running")
_PREFECT_PREFIX = re.compile(r"^[0-9:.]+ \| .*? run '[^']*' - ")
_LONGEST_MESSAGE = 400
_HEADER = """\
| what happened | messages | resumed from | files copied | exit code | bit-equal |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Outcome:
    case: Case
    details: list[str]
    messages: list[str]
    resumed_from: list[str]
    """The tag that each attempt after the first resumed from."""
    copied: str
    exit_code: int
    """The last attempt's."""
    is_equal: bool

    def row(self) -> str:
        what = f"{self.case.name}: {'; '.join(self.details)}" if any(self.details) else self.case.name
        messages = " / ".join(_different(self.messages)).replace(ROOT, "{root}").replace("|", "\\|")
        tags = ", ".join(re.sub("^step-0*", "step ", tag) for tag in self.resumed_from)
        equal = "yes" if self.is_equal else "NO"
        return f"| {what} | {messages} | {tags} | {self.copied} | {self.exit_code} | {equal} |"


def _different(messages: list[str]) -> list[str]:
    """Return the first of all messages that differ only in numbers, such as those of hosts and ranks."""
    first = dict[str, str]()
    for message in messages:
        first.setdefault(re.sub(r"\d+", "", message), message)
    return list(first.values())


def _row(hosts: UnsharedHosts, case: Case, undisturbed: Any) -> str:
    """Return the table's line for a case, even if the case could not be carried out."""
    try:
        return carry_out(hosts, case, undisturbed).row()
    except (AssertionError, subprocess.TimeoutExpired) as error:
        message = " ".join(str(error).split())[-_LONGEST_MESSAGE:].replace("|", "\\|")
        return f"| {case.name} | {message} | | | | NO |"


def carry_out(hosts: UnsharedHosts, case: Case, undisturbed: Any) -> Outcome:
    """Restore the interrupted run, do the damage, and continue the run until it has finished."""
    hosts.restore_disks()
    case.harm(hosts)
    before, details, messages = hosts.files(), list[str](), list[str]()
    for strike in case.strikes:
        before = hosts.files()
        run = hosts.start(case.command, case.options)
        details.append(strike(hosts, run))
        messages += _messages(ended := run.wait(SECONDS))
    case.repair(hosts)
    if not hosts.has_finished:
        before = hosts.files()
        messages += _messages(ended := hosts.start(case.command, case.options).wait(SECONDS))
    equal = hosts.has_finished and weights(hosts.folder()) == undisturbed
    tags = hosts.resumed_from()[1:]
    return Outcome(case, details, messages, tags, _copied(before, hosts.files(), tags[-1:]), ended.exit_code, equal)


def _messages(ended: Ended) -> list[str]:
    """Return the messages in which the command said which checkpoint it chose, and why it failed."""
    lines = [_PREFECT_PREFIX.sub("", line) for line in ended.output.splitlines() if _MESSAGES.search(line)]
    if ended.exit_code and ended.message.startswith("error: "):
        lines.append(ended.message)
    return [" ".join(line.split())[:_LONGEST_MESSAGE] for line in lines]


def _copied(before: Files, after: Files, tags: list[str]) -> str:
    """Count the checkpoint's files that were copied to each host.

    A tag that no host had before was saved by the nodes themselves, so only the files gathered to the head count.
    """
    new = [key for key, inode in after.items() if key[1] in tags and before.get(key) != inode]
    known = {tag for _, tag, _ in before}
    count = Counter(host for host, tag, _ in new if host == "head" or tag in known)
    return ", ".join(f"{number} files to {host}" for host, number in count.items()) or "nothing"


def undisturbed_weights(hosts: UnsharedHosts) -> Any:
    """Return the digests of the final weights of a run without damage. Raises AssertionError if the run fails."""
    run: Started = hosts.start(name="undisturbed")
    require_success(run.wait(SECONDS))
    return weights(hosts.folder("undisturbed"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[case.name for case in CASES])
    parser.add_argument("--into", type=Path, help="replace the table in this document")
    chosen = parser.parse_args()
    rows = list[str]()
    with unshared_hosts() as hosts:
        undisturbed = undisturbed_weights(hosts)
        interrupt(hosts)
        hosts.back_up_disks()
        for case in CASES:
            if chosen.only in {None, case.name}:
                rows.append(_row(hosts, case, undisturbed))
                print(rows[-1], flush=True)
                if chosen.into:
                    write_table(chosen.into, _HEADER, rows)


if __name__ == "__main__":
    main()
