"""Findings: what a check has to say, in one form for every verb."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

# A greedy difference where the target's first two log-probabilities are closer than this is numerics, elsewhere a fault.
NEAR_TIE = 0.1

Severity = Literal["error", "warning", "unknown", "info"]


@dataclass(frozen=True)
class Finding:
    """error: it will fail or lose acceptance; warning: it may; unknown: a deciding fact is missing; info."""

    rule: str
    severity: Severity
    message: str  # what, where, what was found, what to do

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def healthy(findings: list[Finding]) -> bool:
    """Whether nothing stands in the way: no error and nothing unknown."""
    return not any(f.severity in ("error", "unknown") for f in findings)
