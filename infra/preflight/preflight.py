"""Everything that is asked before a launch over hosts, as a table or as an error."""

import logging
from dataclasses import dataclass

from infra.cluster.remote import Transport
from infra.preflight.addresses import Meeting
from infra.preflight.all_reduce import all_reduce
from infra.preflight.checks import ALL_REDUCE, CHECKS, IN_USE, PORT, REACHABLE, Judgement
from infra.preflight.findings import Finding
from infra.preflight.needs import Needs
from infra.preflight.survey import survey
from t5train.errors import HostUnreachable, PreflightError

_log = logging.getLogger(__name__)
COLUMNS = ["check", "result", "what"]


@dataclass(frozen=True)
class Report:
    """What was found; where there is no problem, the ranks can meet."""

    judged: Judgement
    of_all_reduce: list[Finding]
    has_met: bool
    """Whether the all-reduce was tried: not where there were problems before it."""

    @property
    def findings(self) -> list[Finding]:
        """Of the facts, and of the all-reduce."""
        return [*self.judged.findings, *self.of_all_reduce]

    @property
    def problems(self) -> list[Finding]:
        """What keeps the hosts from training together."""
        return [finding for finding in self.findings if finding.is_problem]

    def rows(self) -> list[list[str]]:
        """Of a table with ``COLUMNS``: each finding, and a line for each check without one."""
        rows = []
        for check, holds in CHECKS.items():
            seen = self.judged.seen.get(check)
            found = [finding for finding in self.findings if finding.check == check]
            if check == ALL_REDUCE and not self.has_met:
                rows.append([check, "not tried", "the problems above come first"])
            elif not found:
                rows.append([check, "ok", f"{holds}: {seen}" if seen else holds])
            rows += [[check, "PROBLEM" if finding.is_problem else "note", finding.text] for finding in found]
        return rows


def preflight(needs: Needs, transport: Transport) -> Report:
    """Ask all hosts, and where these have no problem let all ranks meet."""
    judged = survey(needs, transport)
    if judged.meeting is None or judged.port is None or any(one.is_problem for one in judged.findings):
        return Report(judged, [], has_met=False)
    met = [Finding(ALL_REDUCE, text) for text in all_reduce(needs, transport, judged.meeting, judged.port)]
    return Report(judged, met, has_met=True)


def require_agreement(needs: Needs, transport: Transport) -> dict[str, str]:
    """PreflightError with every problem that can be known before the ranks' turn comes, in a second.

    An attempt of this very run that is still going on is none: it holds accelerators and the port. Where the only
    problem is that hosts do not answer, and that can pass, these are returned, with what there is to say of each.
    """
    found = survey(needs, transport).findings
    problems = [one for one in found if one.is_problem and one.check not in {IN_USE, PORT}]
    if not all(problem.can_pass for problem in problems):
        _require_none(problems)
    return {host: problem.text for problem in problems for host in problem.hosts}


@dataclass(frozen=True)
class Fit:
    """What ranks of hosts that can train together are to know."""

    meeting: Meeting
    port: int
    is_node_local: bool


def require_fit(needs: Needs, transport: Transport) -> Fit:
    """Where the ranks can meet, and did, and what they share.

    Raises PreflightError with every problem, and HostUnreachable if that is the only one.
    """
    report = preflight(needs, transport)
    if report.problems and all(problem.check == REACHABLE for problem in report.problems):
        silent = [host for problem in report.problems for host in problem.hosts]
        raise HostUnreachable("; ".join(problem.text for problem in report.problems), silent)  # which can pass
    _require_none(report.problems)
    for remark in report.findings:
        _log.warning("%s: %s", remark.check, remark.text)
    meeting, port = report.judged.meeting, report.judged.port
    assert meeting is not None  # noqa: S101 - else there is a problem
    assert port is not None  # noqa: S101 - as above
    return Fit(meeting, port, report.judged.is_node_local)


def _require_none(problems: list[Finding]) -> None:
    if problems:
        lines = "".join(f"\n  {problem.check}: {problem.text}" for problem in problems)
        raise PreflightError(f"preflight checks failed:{lines}")
