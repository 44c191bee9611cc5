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
    message: str  # what, where, what was found
    fix: str = ""  # a command, or an edit

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"docs": f"docs/checks.md#{self.rule}"}


def error(rule: str, message: str, fix: str = "") -> Finding:
    return Finding(rule, "error", message, fix)


def warning(rule: str, message: str, fix: str = "") -> Finding:
    return Finding(rule, "warning", message, fix)


def unknown(rule: str, message: str, fix: str = "") -> Finding:
    return Finding(rule, "unknown", message, fix)


def info(rule: str, message: str, fix: str = "") -> Finding:
    return Finding(rule, "info", message, fix)


def healthy(findings: list[Finding]) -> bool:
    """Whether nothing stands in the way: no error and nothing unknown."""
    return not any(f.severity in ("error", "unknown") for f in findings)


FIRST_FALLS = (
    0.9  # of the replayed acceptance at the first position, below which the weights are run otherwise
)


def why_apart(
    served: list[float] | None, replayed: list[float] | None, outputs: dict[str, int] | None
) -> str:
    """The likeliest cause when an engine accepts another share of drafts than the replay of the same answers.

    served, replayed: p_i, cumulative acceptance by draft position. Source of the reasoning: docs/faults.md, "served and
    replayed acceptance differ".
    """
    if not served or not replayed:
        return "the engine gives no acceptance by position: compare a few answers by hand"
    if outputs and outputs.get("fault", 0) > outputs.get("equal", 0):
        return (
            "the answers themselves differ: another target, template or precision is served than was replayed"
        )
    first = served[0] / replayed[0] if replayed[0] else 1.0
    if first < FIRST_FALLS:
        return (
            f"the first draft is accepted {served[0]:.0%} of the time, replayed {replayed[0]:.0%}: the engine loads or feeds "
            "the drafter otherwise than it was trained (aux layers, norms before fc, vocabulary map); eyas check names what it can"
        )
    kept = [_later(p) for p in (served, replayed)]
    if len(served) > 1 and kept[0] < FIRST_FALLS * kept[1]:
        return (
            f"the first draft is right as often as replayed, later ones fall off ({kept[0]:.0%} of the first's, replayed {kept[1]:.0%}): "
            "what is fed back differs (norm_output, positions, the drafter's cache)"
        )
    if first > 1:
        return (
            "the engine accepts more than the replay: its answers differ from those replayed, or its counters hold drafts that an "
            "end of answer cut"
        )
    return "a little at every position: numerics of another precision, or too few answers to tell"


def _later(p: list[float]) -> float:
    """Mean acceptance of later positions, as a share of the first's."""
    return sum(p[1:]) / len(p[1:]) / p[0] if len(p) > 1 and p[0] else 1.0
