"""Where in the context speculation pays: measured speed-up and cost, and replayed acceptance, by tokens of context."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Served(NamedTuple):
    """What contexts there are to answer for."""

    trained: int  # tokens of the longest row that the drafter learned from; 0: unknown
    most: int  # tokens that the target takes


def by_context(cell: dict[str, Any], replayed: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record per range of contexts, measured or replayed, ascending.

    `S`, `C`, `tau`: measured, None where nothing was; `tau_replayed` at the cell's k; `S_predicted` = tau_replayed over the C of the
    range, or of the nearest one measured, `C_nearest`.
    """
    measured = {(c["from"], c["below"]): c for c in cell.get("contexts") or ()}
    stored = {(c["from"], c["below"]): c for c in replayed}
    costs = {at: c["C"]["value"] for at, c in measured.items() if c["C"]}
    out = []
    for at in sorted(measured.keys() | stored.keys()):
        found, other = measured.get(at), stored.get(at)
        tau = other["tau"].get(str(cell["k"])) if other else None
        cost = costs[min(costs, key=lambda c: abs(c[1] - at[1]))] if costs else None
        out.append({
            "from": at[0], "below": at[1],
            "prompts": found["prompts"] if found else 0, "conversations": other["conversations"] if other else 0,
            **{name: found[name] if found else None for name in ("S", "C", "tau")},
            "tau_replayed": tau, "C_nearest": cost, "S_predicted": tau / cost if tau and cost else None,
        })  # fmt: skip
    return out


def reasons(rows: Sequence[dict[str, Any]], served: Served) -> list[str]:
    """Where it pays and where it stops, and what nobody measured."""
    out = []
    measured = [r for r in rows if r["S"]]
    if len(measured) > 1:
        by = ", ".join(f"{r['S']['value']:.2f}x {span(r)}" for r in measured)
        out.append(f"by tokens of context: {by}")
        if (stop := _stops(measured)) is not None:
            s, before = measured[stop]["S"], "it pays below that" if stop else "it pays nowhere"
            out.append(
                f"speculation stops paying at {measured[stop]['from']:,} tokens of context "
                f"({s['value']:.2f}x [{s['low']:.2f}, {s['high']:.2f}] {span(measured[stop])}; {before}): {_why(measured, stop)}"
            )
    longer = [
        r
        for r in rows
        if r["S_predicted"] and not r["S"] and (not measured or r["from"] > measured[-1]["from"])
    ]
    if longer and measured:
        foretold = ", ".join(f"{r['S_predicted']:.2f}x {span(r)}" for r in longer)
        out.append(
            f"foretold for longer contexts, from replayed acceptance at the cost measured {span(measured[-1])}: {foretold}"
        )
    end = max((r["below"] for r in rows), default=0)
    if rows and end < served.most:
        trained = f", it was trained on rows of at most {served.trained:,}" if served.trained else ""
        out.append(
            f"nothing is known beyond {end:,} tokens of context: the target takes {served.most:,}{trained}"
        )
    return out


def span(row: dict[str, Any]) -> str:
    return f"from {row['from']:,} to {row['below']:,}"


def _stops(rows: Sequence[dict[str, Any]]) -> int | None:
    """The first of the rows from which on none is above 1."""
    stop = len(rows)
    while stop and rows[stop - 1]["S"]["value"] < 1:
        stop -= 1
    return stop if stop < len(rows) else None


def _why(rows: Sequence[dict[str, Any]], stop: int) -> str:
    """Acceptance against cost, beside the range that pays best."""
    row, best = rows[stop], max(rows, key=lambda r: r["S"]["value"])
    if not (row["tau"] and row["C"] and best["tau"] and best["C"]):
        return "steps and acceptance are unknown there"
    here = f"{row['tau']['value']:.2f} tokens a step where {row['C']['value']:.2f} break even"
    if best is row:
        return here
    return f"{here} ({best['tau']['value']:.2f} and {best['C']['value']:.2f} {span(best)})"
