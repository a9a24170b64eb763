"""Results of variants as Markdown tables."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from tests.acceptance.variants.variant_cases import CASES, Case
from tests.acceptance.variants.variant_runs import Row

GIB = 1 << 30


def table(rows: Sequence[Row]) -> str:
    """A Markdown table with a row for each case, below the machines that the cases ran on."""
    heads, machines = [*COLUMNS], dict.fromkeys(f"{row.get('date')}, {row.get('machine')}" for row in rows)
    lines = [heads, ["---"] * len(heads)]
    lines += [[cell(row) for cell in COLUMNS.values()] for row in rows]
    return "\n".join([*machines, "", _rows(lines)])


def listing(cases: Sequence[Case]) -> str:
    """A Markdown table with a row for each case, and the total seconds for each number of ranks."""
    lines = [f"| {'case | recipe | ranks | precision | steps | approx. s'} |", "|---|---|---|---|---|---|"]
    totals: dict[int, int] = defaultdict(int)
    for case in cases:
        totals[case.ranks] += case.seconds
        lines.append(
            f"| {case.name} | {case.recipe} | {case.ranks} | {case.precision} | {case.steps} | {case.seconds} |"
        )
    return "\n".join([*lines, *(f"{ranks} ranks: about {total} s" for ranks, total in sorted(totals.items()))])


def _rows(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(name: str, form: str, unit: float = 1) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = row.get(name)
        return "" if value is None else format(value / unit, form)

    return cell


def _peer(row: Row) -> str:
    peer = next((case.peer for case in CASES if case.name == row["name"]), None)
    rate = row.get("tokens_per_second")
    return f"{rate / peer[1]:.2f} of {peer[0]}" if peer and rate and not row["tiny"] else ""


def _certificate(row: Row) -> str:
    found: dict[str, Any] | None = row.get("certificate")
    if found is None:
        return ""
    if found["bit_equal"]:
        return f"bit-equal, {found['device']}"
    return f"{found['largest_difference']:.1e} of at most {found['tolerance']:.0e}, {found['device']}"


def _outcome(row: Row) -> str:
    error = row.get("error", "").replace("|", "/")
    return f"{'passed' if row['passed'] else 'FAILED'} {error[:120]}".strip()


def _seconds(row: Row) -> str:
    found = row["seconds"].values()
    return " + ".join(f"{seconds:.0f}" for seconds in found)


def _loss(row: Row) -> str:
    found = row.get("loss")
    return f"{found[0]:.2f} → {found[1]:.2f}" if found else ""


COLUMNS: dict[str, Callable[[Row], str]] = {
    "case": lambda row: row["name"],
    "tokens/s": _number("tokens_per_second", ",.0f"),
    "MFU": _number("mfu", ".1%"),
    "relative to (on H200)": _peer,
    "accelerator GiB": _number("accelerator_memory_bytes", ".1f", GIB),
    "host GiB per rank": _number("host_memory_bytes", ".1f", GIB),
    "host GiB in total": _number("machine_memory_bytes", ".1f", GIB),
    "loss": _loss,
    "skipped": _number("skipped_steps", ".0f"),
    "certificate": _certificate,
    "train + consolidate + export + certify, s": _seconds,
    "outcome": _outcome,
}
