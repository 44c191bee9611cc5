"""verdict: measurements -> ship it or not, at which k, and why.

Reads bench.json and drafter/best/metrics.json; writes verdict.json.

    eyas verdict RUN
"""

from typing import Any

from eyas.progress import say
from eyas.recipe import Resolved, VerdictSection
from eyas.rundir import RunDir, read_json

TAU_AGREES = 0.03  # replayed against served, embedded engine
SPEED_AGREES = 0.10  # predicted against measured


def run(resolved: Resolved, rundir: RunDir) -> dict[str, Any]:
    """Decide; returns the manifest with `ship`, `k`, `reason` and the prediction of every cell."""
    train = rundir.manifest("train")
    facts = {"supervised_tokens": train["supervised_tokens"], "parent": train["parent"]}
    body = decide(rundir.manifest("bench"), resolved.recipe.verdict, facts)
    body["drafter"] = str(read_json(rundir / "drafter" / "best" / "metrics.json")["epoch"])
    verdict = rundir.finish("verdict", body)
    say(f"  {verdict['sentence']}")
    for line in verdict["reasons"]:
        say(f"  - {line}")
    return verdict


def decide(bench: dict[str, Any], options: VerdictSection, facts: dict[str, Any]) -> dict[str, Any]:
    """Ship iff the lower end of the best k's interval reaches min_speedup. A missing or refused measurement is a no."""
    cells = [_predict(c) for c in bench["cells"]]
    valid = [c for c in cells if not c["refused"]]
    load = f"{bench['engine']} at concurrency {bench['concurrency']} ({bench['dtype']}, {bench['device']})"
    if not valid:
        reasons = [f"k={c['k']}: {c['refused']}" for c in cells] or ["nothing was measured"]
        return {
            "ship": False,
            "k": None,
            "best_k": None,
            "load": load,
            "confidence": options.confidence,
            "sentence": f"NO: no valid measurement for {load}.",
            "reasons": reasons,
            "cells": cells,
        }
    best = max(valid, key=lambda c: c["S"]["low"])
    ship = best["S"]["low"] >= options.min_speedup
    s = best["S"]
    interval = f"{s['value']:.2f}x [{s['low']:.2f}, {s['high']:.2f}] at k={best['k']}"
    sentence = (
        f"YES: ship it for {load}: {interval}."
        if ship
        else f"NO: do not ship it for {load}: best is {interval}, and {options.min_speedup:.2f}x was asked for."
    )
    reasons = _reasons(best, ship, options, facts) + [
        f"k={c['k']} is left out: {c['refused']}" for c in cells if c["refused"]
    ]
    return {
        "ship": ship, "k": best["k"] if ship else None, "best_k": best["k"], "load": load, "confidence": options.confidence,
        "sentence": sentence, "reasons": reasons, "cells": cells,
    }  # fmt: skip


def _predict(cell: dict[str, Any]) -> dict[str, Any]:
    """Predicted speed-up: replayed tau over the measured cost ratio."""
    tau = cell["tau_replayed"]
    predicted = tau / cell["C"]["value"] if tau else None
    return {**cell, "S_predicted": predicted}


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


def _reasons(best: dict[str, Any], ship: bool, options: VerdictSection, facts: dict[str, Any]) -> list[str]:
    tau, cost, replayed = best["tau"]["value"], best["C"]["value"], best["tau_replayed"]
    out = [
        f"a step that drafts {best['k']} and verifies costs {cost:.2f} plain steps, so {cost:.2f} tokens a step break even; "
        f"the drafter gives {tau:.2f}"
    ]
    if replayed:
        gap = abs(tau / replayed - 1)
        agrees = (
            "agree, so the engine runs what was trained"
            if gap <= TAU_AGREES
            else "DISAGREE: look for a loading fault"
        )
        out.append(f"replayed {replayed:.3f} and served {tau:.3f} tokens a step {agrees} ({gap:.1%} apart)")
        apart = abs(best["S_predicted"] / best["S"]["value"] - 1)
        within = "within" if apart <= SPEED_AGREES else "NOT within"
        out.append(
            f"predicted {best['S_predicted']:.2f}x (replayed tau / C), measured {best['S']['value']:.2f}x: {within} {SPEED_AGREES:.0%}"
        )
    faults = (best["outputs"] or {}).get("fault", 0)
    if faults:
        out.append(
            f"{faults} greedy answers differ from the plain ones away from near ties: the output is not the target's"
        )
    if facts["parent"]:
        out.append(_added(facts["parent"]))
    if not ship and tau < options.min_speedup * cost:
        out.append(
            f"it needs {options.min_speedup * cost:.2f} tokens a step; it learned from {facts['supervised_tokens']:,} supervised "
            "tokens: give it more answers (prompts, generate.samples, generate.max_tokens) and more epochs"
        )
    elif not ship:
        out.append("the interval is too wide to be sure: more bench.rounds or more prompts would narrow it")
    return out
