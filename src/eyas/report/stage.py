"""report: everything of a run on one self-contained page, verdict first.

Reads the manifests, train/*.jsonl and drafter/best/metrics.json; writes report.html. Always written anew: it takes a second.

    eyas report RUN
"""

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eyas.drafter import replay
from eyas.progress import duration
from eyas.recipe import Resolved
from eyas.report import charts
from eyas.rundir import RunDir, read_json, write_text


def run(resolved: Resolved, rundir: RunDir) -> dict[str, Any]:
    """Render report.html; returns its path and size. Everything that a model or a prompt wrote is escaped."""
    made = {
        name: rundir.manifest(name) for name in ("generate", "extract", "train", "check", "bench", "verdict")
    }
    metrics = read_json(rundir / "drafter" / "best" / "metrics.json")
    trained = read_json(rundir / "drafter" / "best" / "contract.json")["trained_length"]
    record = read_json(rundir / "run.json")
    verdict, bench = made["verdict"], made["bench"]
    by_context = verdict.get("contexts", [])
    chosen = (verdict["load"], verdict["best_k"])
    best = next((c for c in verdict["cells"] if (c["concurrency"], c["k"]) == chosen), None)
    min_speedup = resolved.recipe.verdict.min_speedup
    draw = charts.loads if len(bench["concurrency"]) > 1 else charts.speedups
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    html = environment.get_template("page.html.jinja").render(
        recipe=resolved.recipe,
        target=resolved.target.identity,
        verdict=verdict,
        best=best,
        bench=bench,
        train=made["train"],
        metrics=metrics,
        contexts=by_context,
        fewest=replay.FEWEST,
        charts={
            "speed": Markup(draw(verdict["cells"], min_speedup)),
            "acceptance": Markup(_acceptance(metrics)),
            "loss": Markup(charts.losses(_lines(rundir / "train" / "steps.jsonl"))),
            "contexts": Markup(charts.contexts(by_context, trained)) if len(by_context) > 1 else "",
            "tau": Markup(charts.taus(_lines(rundir / "train" / "evals.jsonl"))),
        },
        checks=_checks(made),
        stages=_stages(record["stages"]),
        provenance=_provenance(resolved, record, made),
    )
    path = rundir / "report.html"
    write_text(path, html)
    return {"stage": "report", "file": str(path), "bytes": len(html.encode())}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _acceptance(metrics: dict[str, Any]) -> str:
    by_domain = {name: d["p"] for name, d in metrics["domains"].items()}
    return charts.acceptance(by_domain, metrics["p"][str(metrics["select_k"])])


def _checks(made: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    conversations, states, train = made["generate"], made["extract"], made["train"]
    checks, vocabulary, rows = states["checks"], train["vocabulary"], conversations["rows"]
    out = [
        (
            "conversations",
            f"{conversations['engine']}: {rows.get('train', 0)} training and {rows.get('held_out', 0)} held-out answers, "
            f"{conversations['quarantined']} prompts left out, finish: "
            + ", ".join(f"{n} {reason}" for reason, n in conversations["finish"].items()),
        ),
        ("what they are", _truth(conversations)),
        *_mixture(conversations),
        (
            "states",
            f"head(norm(last state)) has the target's argmax at {checks['head_agreement']:.3%} of {checks['positions']:,} positions",
        ),
        ("how they came", _came(states)),
        (
            "draft vocabulary",
            f"{vocabulary['size']:,} ids cover {vocabulary['coverage']:.2%} of the supervised tokens",
        ),
        (
            "drafter",
            f"{len([f for f in made['check']['findings'] if f['severity'] != 'info']) or 'no'} findings, "
            f"{'healthy' if made['check']['healthy'] else 'NOT healthy'}",
        ),
    ]
    if "greedy_agreement" in checks:
        out.insert(
            2,
            (
                "greedy answers",
                f"repeated by the pass over their ids at {checks['greedy_agreement']:.3%}, "
                f"{checks['greedy_near_ties']} near ties apart",
            ),
        )
    return out


def _truth(about: dict[str, Any]) -> str:
    """Shares of the answers, and their lengths."""
    t = about["truth"]
    names = {
        "ends_of_turn": "have their end of turn", "truncated": "cut by max_tokens", "cut_while_thinking": "cut while thinking", "thoughts": "with a thought",
        "calls": "with a tool call", "loops": "go round in circles", "refusals": "begin with a refusal",
    }  # fmt: skip
    out = [f"{t[key]:.1%} {name}" for key, name in names.items() if t[key] or key == "ends_of_turn"]
    lengths = t["lengths"]["completion"]
    out.append(f"length {lengths['5']} / {lengths['50']} / {lengths['95']} tokens at 5 / 50 / 95 %")
    out += [
        f"{n:,} in {name} script" if name != "none" else f"{n:,} without letters"
        for name, n in t["scripts"].items()
    ]
    if asked := sum(t["languages"].values()):
        named = ", ".join(f"{name} {n / asked:.0%}" for name, n in list(t["languages"].items())[:8])
        out.append(f"languages of {asked:,}: {named}")
    if found := about["on_policy"]:
        out.append(
            f"{found['agrees'] / found['positions']:.1%} of {found['positions']:,} greedy tokens are the target's own first choice"
        )
    out += [f"{n:,} left out: {reason}" for reason, n in about["flagged"].items()]
    return ", ".join(out)


def _mixture(about: dict[str, Any]) -> list[tuple[str, str]]:
    """What was left out of the prompts, and how they compare with the evaluation prompts, by script and domain."""
    prompts = about["prompts"]
    out = []
    if prompts["left_out"]:
        said = ", ".join(f"{n:,} {kind}" for kind, n in prompts["left_out"].items())
        out.append(("prompts left out", said))
    if prompts["evaluation"]["scripts"]:
        for kind in ("scripts", "domains"):
            mine, theirs = (_shares(d[kind]) for d in (prompts, prompts["evaluation"]))
            out.append((f"{kind}, beside the evaluation's", f"{mine}; evaluation: {theirs}"))
    return out


def _shares(counts: dict[str, int]) -> str:
    total = max(sum(counts.values()), 1)
    return ", ".join(
        f"{name} {n / total:.0%}" for name, n in sorted(counts.items(), key=lambda kv: -kv[1])[:8]
    )


def _came(states: dict[str, Any]) -> str:
    """One pass or two, what one saved, and how like the states are to other computations of them."""
    out = states["reason"]
    if states["saved_s"]:
        out += f"; a second reading would have taken the embedded engine some {duration(states['saved_s'])}"
    names = {
        "against_embedded": "against the embedded engine", "decoded_against_prefilled": "decoded against prefilled",
        "together_against_alone": "together against alone",
    }  # fmt: skip
    for key, name in names.items():
        if found := states["checks"].get(key):
            out += (
                f". {name[0].upper()}{name[1:]}: cosine at least {min(found['cosine'].values()):.4f} by layer"
            )
    return out


def _stages(stages: dict[str, Any]) -> dict[str, dict[str, str]]:
    out = {}
    for name, record in stages.items():
        if name == "report":
            continue
        rates = record.get("rates") or {}
        rate = ", ".join(
            f"{v:,.4g} {k.removesuffix('_per_s').replace('_', ' ')}/s" for k, v in rates.items() if v
        )
        out[name] = {"time": duration(record.get("seconds", 0)), "rate": rate}
    return out


def _provenance(
    resolved: Resolved, record: dict[str, Any], made: dict[str, dict[str, Any]]
) -> list[tuple[str, str]]:
    m = record["machine"]
    parent = made["train"]["parent"]
    started = []
    if parent:
        gave = f"{parent['tau']:.3f} tokens a step at k={parent['k']}"
        started = [
            (
                "started from",
                f"{resolved.recipe.train.init_from}, which gave {gave} on these held-out answers",
            )
        ]
    commit = f", commit {record['git']}" if record["git"] else ""
    return [
        ("target", f"{resolved.target.identity}, fingerprint {resolved.target.fingerprint}"),
        ("aux layers", f"{resolved.aux_layers} (id i = input of layer i)"),
        *started,
        ("computed in", f"{resolved.dtype} on {resolved.device}"),
        ("eyas", f"{record['eyas']}{commit}"),
        ("machine", f"{m['cpu']}, {m['cores']} cores, {m['memory_bytes'] / 2**30:.0f} GiB, {m['system']}"),
        ("versions", ", ".join(f"{k} {v}" for k, v in {"python": m["python"], **m["versions"]}.items())),
        ("seed", str(resolved.recipe.train.seed)),
        ("fingerprints", ", ".join(f"{name} {body['fingerprint']}" for name, body in made.items())),
    ]
