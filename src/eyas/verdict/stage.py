"""verdict: measurements -> ship it or not, at which loads and with which k, and why.

Reads bench.json and drafter/best/metrics.json; writes verdict.json.

    eyas verdict RUN
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from eyas import profiles
from eyas.causes import why_apart
from eyas.progress import say
from eyas.recipe import Resolved
from eyas.rundir import RunDir, read_json
from eyas.schema import VerdictSection
from eyas.verdict import contexts
from eyas.verdict.contexts import Served

TAU_AGREES = {"hf": 0.03}  # replayed against served, embedded engine
TAU_AGREES_SERVED = 0.05
SPEED_AGREES = 0.10  # predicted against measured
COST_AGREES = 0.10  # of drafting, foretold against measured


def run(resolved: Resolved, rundir: RunDir) -> dict[str, Any]:
    """Decide; returns the manifest with `ship`, `k`, `reasons`, and per load what is best and what was predicted."""
    train = rundir.manifest("train")
    metrics = read_json(rundir / "drafter" / "best" / "metrics.json")
    trained = read_json(rundir / "drafter" / "best" / "contract.json")["trained_length"]
    facts = {
        "supervised_tokens": train["supervised_tokens"], "parent": train["parent"],
        "contexts": metrics.get("contexts", []), "served": Served(trained, resolved.target.context),
    }  # fmt: skip
    body = decide(rundir.manifest("bench"), resolved.recipe.verdict, facts)
    profile = profiles.read(rundir, resolved)
    if profile and profile["engine"] == rundir.manifest("bench")["engine"]:
        body["profile"], said = _foretold(body["cells"], profile)
        body["reasons"] += said
    body["drafter"] = str(metrics["epoch"])
    verdict = rundir.finish("verdict", body)
    show(verdict)
    return verdict


def _foretold(
    cells: Sequence[dict[str, Any]], profile: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The cost of drafting with the trained drafter beside that which the profile found with an untrained one."""
    before = {(c.concurrency, c.k): c.C for c in profiles.costs(profile)}
    rows = [
        {
            "k": c["k"],
            "concurrency": c["concurrency"],
            "C": (c.get("C_decode") or c["C"])["value"],
            "C_profile": before[at],
        }
        for c in cells
        if c["C"] and not c["refused"] and (at := (c["concurrency"], c["k"])) in before
    ]
    if not rows:
        return [], []
    far = max(rows, key=lambda r: abs(r["C_profile"] / r["C"] - 1))
    gap = abs(far["C_profile"] / far["C"] - 1)
    within = "within" if gap <= COST_AGREES else "NOT within"
    return rows, [
        f"the profile before training foretold the cost of drafting {within} {COST_AGREES:.0%} (at most {gap:.1%} apart: {_where(far)}, "
        f"{far['C_profile']:.2f} foretold, {far['C']:.2f} measured)"
    ]


def show(verdict: dict[str, Any]) -> None:
    """The sentence and its reasons."""
    say(f"  {verdict['sentence']}")
    for line in verdict["reasons"]:
        say(f"  - {line}")


def decide(bench: dict[str, Any], options: VerdictSection, facts: dict[str, Any] | None) -> dict[str, Any]:
    """Ship iff, at some load, the lower end of the best k's interval reaches min_speedup. A missing or refused measurement
    is a no. facts: how the drafter was trained, where that is known."""
    cells = [_predict(c) for c in bench["cells"]]
    place = f"{bench['engine']} ({', '.join(filter(None, [bench['dtype'], bench['device']]))})".replace(
        " ()", ""
    )
    if not any(not c["refused"] for c in cells):
        reasons = [f"{_where(c)}: {c['refused']}" for c in cells] or ["nothing was measured"]
        return {
            "ship": False, "k": None, "best_k": None, "load": None, "loads": [], "place": place,
            "confidence": options.confidence, "sentence": f"NO: no valid measurement for {place}.", "reasons": reasons,
            "cells": cells, "contexts": [],
        }  # fmt: skip
    loads = [found for b in bench["concurrency"] if (found := _at_load(cells, b, options))]
    noise = next((n for c in cells if (n := (c.get("sampled") or {}).get("unlikely"))), None)
    paying = [found for found in loads if found["ship"]]
    best = max(paying or loads, key=lambda found: found["S"]["low"])
    cell = next(c for c in cells if (c["concurrency"], c["k"]) == (best["concurrency"], best["k"]))
    reasons = _reasons(cell, bool(paying), options, facts, bench["engine"])
    sentence = _sentence(loads, place, options)
    if noise:
        reasons.insert(
            0, f"sampled answers are NOT the target's with the drafter on: {noise}; look for a newer engine"
        )
        if options.traffic == "any":
            paying = []
            sentence = f"NO: do not ship it for {place}: it changes sampled answers. For greedy requests alone: {sentence}"
        else:
            sentence = f"For greedy requests alone: {sentence}"
    reasons += _over_loads(loads, cells, bench["engine"]) if len(loads) > 1 else []
    by_context = contexts.by_context(cell, facts["contexts"] if facts else ())
    reasons += contexts.reasons(by_context, facts["served"] if facts else Served(0, 0))
    reasons += [f"{_where(c)} is left out: {c['refused']}" for c in cells if c["refused"]]
    return {
        "ship": bool(paying), "k": best["k"] if paying else None, "best_k": best["k"], "load": best["concurrency"],
        "loads": loads, "place": place, "confidence": options.confidence,
        "sentence": sentence, "reasons": reasons, "cells": cells,
        "contexts": by_context,
    }  # fmt: skip


def _where(cell: dict[str, Any]) -> str:
    return f"k={cell['k']} at concurrency {cell['concurrency']}"


def _at_load(cells: Sequence[dict[str, Any]], load: int, options: VerdictSection) -> dict[str, Any] | None:
    """The best k at a load, and whether it pays there."""
    valid = [c for c in cells if c["concurrency"] == load and not c["refused"]]
    if not valid:
        return None
    best = max(valid, key=lambda c: c["S"]["low"])
    return {
        "concurrency": load,
        "k": best["k"],
        "S": best["S"],
        "ship": best["S"]["low"] >= options.min_speedup,
    }


def _sentence(loads: Sequence[dict[str, Any]], place: str, options: VerdictSection) -> str:
    """What to do, by ranges of load with the same answer and the same k."""
    parts = []
    for (ship, k), group in groupby(loads, key=lambda f: (f["ship"], f["k"] if f["ship"] else None)):
        found = list(group)
        best = max(found, key=lambda f: f["S"]["low"])
        s = best["S"]
        spread = f"{s['value']:.2f}x [{s['low']:.2f}, {s['high']:.2f}]"
        if len(found) > 1:
            spread += f" at {best['concurrency']}"
        span = _span([f["concurrency"] for f in found])
        parts.append(
            f"at concurrency {span} with k={k}: {spread}"
            if ship
            else f"not at {span} (best {spread}, k={best['k']})"
        )
    if not any(f["ship"] for f in loads):
        best = max(loads, key=lambda f: f["S"]["low"])
        s = best["S"]
        interval = f"{s['value']:.2f}x [{s['low']:.2f}, {s['high']:.2f}] with k={best['k']} at concurrency {best['concurrency']}"
        return f"NO: do not ship it for {place}: best is {interval}, and {options.min_speedup:.2f}x was asked for."
    return f"YES: ship it for {place}, {'; '.join(parts)}."


def _span(loads: Sequence[int]) -> str:
    return str(loads[0]) if len(loads) == 1 else f"{loads[0]} to {loads[-1]}"


def _predict(cell: dict[str, Any]) -> dict[str, Any]:
    """Predicted speed-up: replayed tau over the measured cost ratio."""
    tau = cell.get("tau_replayed")
    predicted = tau / cell["C"]["value"] if tau and cell["C"] else None
    return {**cell, "S_predicted": predicted}


def _over_loads(loads: Sequence[dict[str, Any]], cells: Sequence[dict[str, Any]], engine: str) -> list[str]:
    """Why the answer changes with the load, and how well it was foretold at every load."""
    by = {(c["concurrency"], c["k"]): c for c in cells}
    chosen = [by[f["concurrency"], f["k"]] for f in loads]
    out = []
    if all(c["C"] for c in chosen):
        costs = ", ".join(f"{c['C']['value']:.2f} at {c['concurrency']}" for c in chosen)
        out.append(f"the cost of a drafting step in plain steps, best k at each load: {costs}")
    foretold = [c for c in cells if c["S_predicted"] and not c["refused"]]
    if foretold:
        far = max(foretold, key=lambda c: abs(c["S_predicted"] / c["S"]["value"] - 1))
        gap = abs(far["S_predicted"] / far["S"]["value"] - 1)
        within = "within" if gap <= SPEED_AGREES else "NOT within"
        out.append(
            f"over all loads and k, predicted and measured speed-up are {within} {SPEED_AGREES:.0%} (at most {gap:.1%} apart, {_where(far)})"
        )
        limit = TAU_AGREES.get(engine, TAU_AGREES_SERVED)
        apart = [c for c in foretold if abs(c["tau"]["value"] / c["tau_replayed"] - 1) > limit]
        out += [
            f"{_where(c)}: served {c['tau']['value']:.3f}, replayed {c['tau_replayed']:.3f}: {_cause(c)}"
            for c in apart
        ]
    return out


def _cause(cell: dict[str, Any]) -> str:
    return why_apart(cell.get("p"), cell.get("p_replayed"), cell.get("outputs"))


def _added(parent: dict[str, Any]) -> str:
    """What finetuning added to the drafter that training started from."""
    if parent["best_epoch"] == 0:
        return f"finetuning added nothing to the {parent['tau']:.3f} tokens a step (k={parent['k']}) that training started from"
    gain = parent["gain"]
    sure = "" if gain["low"] > 0 else ", which may be chance"
    return (
        f"of these, finetuning added {gain['value']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}] tokens a step at k={parent['k']} "
        f"(replayed){sure}: training started from {parent['tau']:.3f}"
    )


def _reasons(
    best: dict[str, Any], ship: bool, options: VerdictSection, facts: dict[str, Any] | None, engine: str
) -> list[str]:
    out = []
    cost = best["C"]["value"] if best["C"] else None
    if cost:
        tau, replayed = best["tau"]["value"], best.get("tau_replayed")
        out.append(
            f"a step that drafts {best['k']} and verifies costs {cost:.2f} plain steps, so {cost:.2f} tokens a step break even; "
            f"the drafter gives {tau:.2f}"
        )
        if replayed:
            gap = abs(tau / replayed - 1)
            agrees = (
                "agree, so the engine runs what was trained"
                if gap <= TAU_AGREES.get(engine, TAU_AGREES_SERVED)
                else f"DISAGREE: {_cause(best)}"
            )
            out.append(
                f"replayed {replayed:.3f} and served {tau:.3f} tokens a step {agrees} ({gap:.1%} apart)"
            )
            apart = abs(best["S_predicted"] / best["S"]["value"] - 1)
            within = "within" if apart <= SPEED_AGREES else "NOT within"
            out.append(
                f"predicted {best['S_predicted']:.2f}x (replayed tau / C), measured {best['S']['value']:.2f}x: {within} {SPEED_AGREES:.0%}"
            )
    if best.get("sampled") and not best["sampled"]["unlikely"]:
        hot = best["sampled"]
        out.append(
            f"at temperature {hot['temperature']:g} it gives {hot['tau']:.2f} tokens a step"
            + (f", greedy {best['tau']['value']:.2f}" if best["tau"] else "")
        )
    out += _wrongs(best)
    if facts and facts["parent"]:
        out.append(_added(facts["parent"]))
    if not ship:
        out.append(_remedy(best, cost, options, facts))
    return out


def _wrongs(best: dict[str, Any]) -> list[str]:
    """Signs that it is no longer the same model."""
    out = []
    faults = (best.get("outputs") or {}).get("fault", 0)
    if faults:
        out.append(
            f"{faults} greedy answers differ from the plain ones away from near ties: the output is not the target's"
        )
    for name, found in (best.get("probes") or {}).items():
        if found["kind"] == "wrong" and found["without"] == "right":
            out.append(
                f"the {name} probe went right without the drafter and wrong with it: {found['detail'][:160]}"
            )
    return out


def _remedy(
    best: dict[str, Any], cost: float | None, options: VerdictSection, facts: dict[str, Any] | None
) -> str:
    if cost is None:
        return "nothing is known of steps and acceptance: the server returns no token ids"
    if best["tau"]["value"] >= options.min_speedup * cost:
        return "the interval is too wide to be sure: more bench.rounds or more prompts would narrow it"
    need = f"it needs {options.min_speedup * cost:.2f} tokens a step"
    if facts is None:
        return f"{need}: another drafter, or fewer drafts a step, is needed at this load"
    return (
        f"{need}; it learned from {facts['supervised_tokens']:,} supervised tokens: give it more answers (prompts, "
        "generate.samples, generate.max_tokens) and more epochs"
    )
