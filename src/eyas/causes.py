"""Findings: what a check has to say, in one form for every verb."""

from collections.abc import Set
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


FALLS = 0.9  # of the replayed acceptance, below which an engine runs the weights otherwise


@dataclass(frozen=True)
class Cause:
    """Why an engine may accept another share of drafts than the replay of the same answers. signs: what speaks for it, all of them;
    experiment: what would tell it from the others."""

    signs: frozenset[str]
    what: str
    experiment: str


def _cause(signs: str, what: str, experiment: str) -> Cause:
    return Cause(frozenset(signs.split()), what, experiment)


# Signs: answers (they differ), everywhere (in every kind of step), prompt (the first step after a prompt alone), later (steps beyond it
# alone), batched (beside other requests alone), cached (prompts of the prefix cache alone), long (in long rows alone), deep (later drafts of a step alone), more (the engine accepts more).
CAUSES = (
    _cause("answers", "the answers themselves differ: another target, template or precision is served than was replayed",
           "compare the ids of one greedy answer at temperature 0, and the model that /v1/models names"),
    _cause("everywhere", "the engine loads or feeds the drafter otherwise than it was trained (aux layers, norms before fc, residual, vocabulary map)",
           "eyas check DIR --target T --engine E --engine-version V, then --probe"),
    _cause("everywhere", "the server has another drafter than this folder, or an older copy of it", "compare the folder in the server's command line (eyas ps) with this one"),
    _cause("everywhere", "the server's target has other weights (quantised, or another revision)", "serve the target that was replayed, in bfloat16, once"),
    _cause("batched", "requests that run together are mixed up: padding, or graphs captured for another batch", "serve once with --enforce-eager"),
    _cause("batched", "requests that run together are mixed up outside of graphs", "serve once with --max-num-seqs 1"),
    _cause("cached", "a prompt that is found in the prefix cache reaches the drafter without all of its states", "serve once with --no-enable-prefix-caching"),
    _cause("prompt", "the states of a prompt that is read in parts do not all reach the drafter", "serve once with --max-num-batched-tokens above the longest prompt"),
    _cause("later", "after a step some drafts are rejected, and the drafter's cache or positions do not forget them", "serve once with k = 1, then with --enforce-eager"),
    _cause("long", "rope's theta or scaling, or a window, is another in the engine: it shows with the position", "compare rope_theta and rope_scaling in config.json with the engine's log"),
    _cause("long", "the drafter's context ends before the target's", "look for max_position_embeddings and max_model_len in the engine's log"),
    _cause("deep", "what is fed back differs (norm_output, positions, the drafter's cache)", "serve once with k = 1: the first draft must then be as good as replayed"),
    _cause("more", "the engine accepts more than the replay: its answers differ from those replayed, or its counters hold drafts that an end of answer cut",
           "eyas check DIR --target T --probe --url U replays the engine's own answers"),
)  # fmt: skip
LITTLE = Cause(
    frozenset(), "a little at every position: numerics of another precision, or too few answers to tell", "measure with more prompts"
)  # fmt: skip


def ranked(signs: Set[str]) -> list[Cause]:
    """The causes that all of whose signs are there, the likeliest first."""
    return [c for c in CAUSES if c.signs <= signs] or [LITTLE]


def why_apart(
    served: list[float] | None, replayed: list[float] | None, outputs: dict[str, int] | None
) -> str:
    """The likeliest cause when an engine accepts another share of drafts than the replay of like answers, and the next experiment.

    served, replayed: p_i, cumulative acceptance by draft position.
    """
    if not served or not replayed:
        return "the engine gives no acceptance by position: compare a few answers by hand"
    signs: set[str] = set()
    said = ""
    first = served[0] / replayed[0] if replayed[0] else 1.0
    kept = [_later(p) for p in (served, replayed)]
    if outputs and outputs.get("fault", 0) > outputs.get("equal", 0):
        signs = {"answers"}
    elif first < FALLS:
        signs = {"everywhere"}
        said = f"the first draft is accepted {served[0]:.0%} of the time, replayed {replayed[0]:.0%}: "
    elif len(served) > 1 and kept[0] < FALLS * kept[1]:
        signs = {"deep"}
        said = f"the first draft is right as often as replayed, later ones fall off ({kept[0]:.0%} of the first's, replayed {kept[1]:.0%}): "
    elif first > 1:
        signs = {"more"}
    cause = ranked(signs)[0]
    return f"{said}{cause.what}; next: {cause.experiment}"


def _later(p: list[float]) -> float:
    """Mean acceptance of later positions, as a share of the first's."""
    return sum(p[1:]) / len(p[1:]) / p[0] if len(p) > 1 and p[0] else 1.0
