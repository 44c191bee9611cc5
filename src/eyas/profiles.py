"""profile.json: what drafting costs, measured before there is a drafter, and what acceptance would pay for it.

C(k, b): a step that drafts k and verifies, in plain steps, at load b, of the steps beside which no other prompt is read. Tokens a step break even at tau* = C. With the same
chance a for each further draft, tau = 1 + a + a^2 + … + a^k, so the a that breaks even follows from C; a_1, the first draft's,
must be at least that, since later drafts are not accepted more often.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from eyas.recipe import Resolved
from eyas.rundir import RunDir, fingerprint, read_json

FILE = "profile.json"
FIGURE = "C_decode"  # of bench/measure.py: a profile of another figure is measured again
CHANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class Cost(NamedTuple):
    k: int
    concurrency: int
    C: float


def key(resolved: Resolved) -> str:
    """Of all that the cost of drafting depends on, but the load and k: target, engine, precision, device, the drafter's shape."""
    recipe = resolved.recipe
    engine = recipe.engine.model_dump(mode="json", exclude={"url", "python"})
    shape = {"draft_vocab": recipe.train.draft_vocab, "norms": recipe.train.norms.model_dump(mode="json")}
    return fingerprint(
        [
            FIGURE,
            resolved.target.fingerprint,
            resolved.dtype,
            resolved.device,
            engine,
            shape,
            resolved.aux_layers,
        ]
    )


def read(rundir: RunDir, resolved: Resolved) -> dict[str, Any] | None:
    """The run's profile, where one was measured for what the recipe now says."""
    path = rundir / FILE
    found = read_json(path) if path.is_file() else None
    return found if found and found["key"] == key(resolved) else None


def costs(profile: dict[str, Any]) -> list[Cost]:
    return [Cost(c["k"], c["concurrency"], c["C"]["value"]) for c in profile["costs"]]


def tau_of(a: float, k: int) -> float:
    """Tokens a step when each further draft is accepted with chance a: 1 + a + … + a^k."""
    return sum(a**i for i in range(k + 1))


def needed(cost: float, k: int) -> float | None:
    """The a that breaks even; 0 where drafting costs nothing, None where even a = 1 would lose."""
    if cost > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tau_of(middle, k) < cost else (low, middle)
    return high if cost > 1 else 0.0


def best(found: Sequence[Cost], a: float) -> tuple[int | None, float]:
    """The best k of one load at acceptance a and its speed-up; None where none is faster than plain."""
    speeds = [(tau_of(a, c.k) / c.C, c.k) for c in found]
    speed, k = max(speeds)
    return (k, speed) if speed > 1 else (None, speed)


def lines(profile: dict[str, Any]) -> list[str]:
    """The costs, what breaks even, and the best k by acceptance, one line each."""
    out = []
    for c in profile["costs"]:
        value, need = c["C"]["value"], needed(c["C"]["value"], c["k"])
        spread = f"C {value:.2f} [{c['C']['low']:.2f}, {c['C']['high']:.2f}]"
        out.append(
            f"k={c['k']} at concurrency {c['concurrency']}: {spread}, so {value:.2f} tokens a step break even; "
            + (
                f"{max(value - 1, 0) / c['k']:.0%} of all drafts must be accepted, the first with a_1 of {need:.2f} or more"
                if need is not None
                else f"{c['k'] + 1} are the most there can be: it cannot pay"
            )
        )
    for load in sorted({c.concurrency for c in costs(profile)}):
        here = [c for c in costs(profile) if c.concurrency == load]
        parts = []
        for a in CHANCES:
            k, speed = best(here, a)
            parts.append(f"{a:.1f}: {f'k={k} ({speed:.2f}x)' if k else 'none'}")
        out.append(f"best k at concurrency {load} by acceptance: {', '.join(parts)}")
    return out
