"""The results of the kills of one stage."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Fault = Literal["incomplete chosen", "cannot resume", "complete lost", "different result"]
FoundFaults = Mapping[Fault, Sequence[str]]
FAULTS: tuple[Fault, ...] = ("incomplete chosen", "cannot resume", "complete lost", "different result")
HEADER = """\
| stage killed | kills | undisturbed, s | killed after, s | kills in each fifth of that time | incomplete tag chosen | \
could not resume | complete tag lost | different result |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass
class Tally:
    """The kills of one stage, which takes ``seconds`` when it is not killed."""

    stage: str
    seconds: float
    seed: int
    moments: list[float] = field(default_factory=list)
    """Seconds from the start of the stage to each kill."""
    faults: list[tuple[Fault, str]] = field(default_factory=list)
    drawn: int = 0
    partly_removed: int = 0
    """Kills that left a partly removed folder, which gc removes."""

    def __post_init__(self) -> None:
        self._rng = random.Random(f"{self.seed} {self.stage}")

    def draw(self) -> float:
        self.drawn += 1
        return self._rng.uniform(0, self.seconds)

    def record(self, moment: float, found: FoundFaults, *, counts: bool = True) -> None:
        """Record what was found after a kill. A kill after the end of the stage does not count."""
        self.moments += [moment] if counts else []
        print(f"{self.stage}: kill {len(self.moments)} after {moment:.3f} s", flush=True)
        self.record_faults(f"killed after {moment:.3f} s", found)

    def record_faults(self, when: str, found: FoundFaults) -> None:
        """Record what was found, and print it at once."""
        for fault, texts in found.items():
            for text in texts:
                self.faults.append((fault, text))
                print(f"{self.stage}, {when}: {fault}: {text}", flush=True)

    def row(self) -> str:
        fifths = Counter(min(4, int(5 * moment / self.seconds)) for moment in self.moments)
        counted = Counter(fault for fault, _ in self.faults)
        cells = [
            self.stage,
            str(len(self.moments)),
            f"{self.seconds:.2f}",
            f"{min(self.moments):.3f} - {max(self.moments):.3f}",
            " / ".join(str(fifths[fifth]) for fifth in range(5)),
            *(str(counted[fault]) for fault in FAULTS),
        ]
        return f"| {' | '.join(cells)} |"
