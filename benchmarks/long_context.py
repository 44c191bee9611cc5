"""Acceptance by length of context, of drafters that were trained on short rows and on long ones.

    python benchmarks/long_context.py RUN --out FOLDER [--prompts 3000] [--lengths 2048 8192] [--set KEY=VALUE …]

RUN is a run folder whose generate is done. Prompts are made of its answers: so many of them as reference text that the whole is of a
length drawn evenly on a logarithmic scale, up to the longest of --lengths, and a question of eyas's own; the target answers.
For each of --lengths a drafter is trained on rows that are no longer, on equally many supervised tokens, and judged by replay on
held-out answers of all lengths, beside the drafter that training starts from (train.init_from). FOLDER/recipe.yaml is the run itself:
`eyas run FOLDER/recipe.yaml` goes on with it, benches, and its report shows where in the context speculation stops paying. Writes
docs/results/long-context.json.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import yaml
from common import write

from eyas import pipeline
from eyas.generate import prompts as prompt_files
from eyas.recipe import Resolved
from eyas.rundir import RunDir, read_json, write_json
from eyas.schema import PromptsSection
from eyas.stores import conversations
from eyas.train import parent, stage, vocabulary
from eyas.train.data import Data, load, resident

SHORTEST = 64  # tokens of a prompt
ROOM = 64  # tokens for the marks of the template


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=3000)
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--set", dest="changes", action="append", default=[])
    a = parser.parse_args()
    recipe = made(a)
    pipeline.run(str(recipe), (), str(a.out / "run"), last="extract")
    resolved, rundir, _ = pipeline.open_run(str(recipe), (), str(a.out / "run"))
    start = parent.read(resolved)
    data = resident(load(resolved, rundir, (start and start.trained_on) or frozenset()), resolved.device)
    rows = {}
    with tempfile.TemporaryDirectory() as work:
        for name, mine in parts(data, a.lengths).items():
            rows[name] = trained(resolved, RunDir(Path(work) / name), mine, start)
    show(rows)
    settings = {"prompts": a.prompts, "recipe": yaml.safe_load(recipe.read_text(encoding="utf-8"))}
    write("long-context", {"rows": rows, "settings": settings})


# ---- the run ----


def made(a: argparse.Namespace) -> Path:
    """FOLDER/recipe.yaml with its prompts: RUN's target and sampling, all else as --set says."""
    resolved, rundir, _ = pipeline.open_run(str(a.run), (), str(a.run))
    a.out.mkdir(parents=True, exist_ok=True)
    most = max(a.lengths) - resolved.recipe.generate.max_tokens - ROOM
    prompts = a.out / "prompts.jsonl"
    if not prompts.is_file():
        lines = long_prompts(rundir, a.prompts, most)
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    whole = yaml.safe_load((rundir / "recipe.yaml").read_text(encoding="utf-8"))
    body = {
        "name": "long-context",
        "target": {k: v for k, v in whole["target"].items() if k in ("model", "dtype", "trust_remote_code")},
        "prompts": {"sources": [{"path": str(prompts.resolve())}], "held_out": 0.15},
        "generate": whole["generate"],
    }
    for change in a.changes:
        key, _, value = change.partition("=")
        section, _, name = key.partition(".")
        body.setdefault(section, {})[name] = yaml.safe_load(value)
    path = a.out / "recipe.yaml"
    path.write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")
    return path


def long_prompts(rundir: RunDir, count: int, most: int) -> list[dict[str, str]]:
    """Reference text made of answers of the run, and a question, up to `most` tokens in all."""
    notes = [r for r in conversations.read(rundir / "conversations") if r.text]
    builtin = PromptsSection.model_validate({"sources": [{"path": "builtin"}]})
    questions = [p.turns[0] for p in prompt_files.read(builtin).prompts]
    rng = np.random.default_rng(0)
    out = []
    for i in range(count):
        left = np.exp(rng.uniform(np.log(SHORTEST), np.log(most))) - SHORTEST
        text = []
        for j in rng.permutation(len(notes)):
            left -= len(notes[j].completion_ids)
            if left < 0:
                break
            text.append(notes[j].text.strip())
        question = questions[rng.integers(len(questions))]
        out.append({"id": f"long-{i}", "domain": "long", "prompt": "\n\n".join([*text, question])})
    return out


# ---- training ----


def parts(data: Data, lengths: list[int]) -> dict[str, Data]:
    """For each length the rows that are no longer, as many supervised tokens as all of them have."""
    fitting = {n: [r for r in data.train if len(r) <= n] for n in sorted(lengths)}
    budget = min(sum(map(pairs, rows)) for rows in fitting.values())
    out = {}
    for length, rows in fitting.items():
        mine, total = [], 0
        for i in np.random.default_rng(0).permutation(len(rows)):
            if total + pairs(rows[i]) <= budget:
                mine.append(rows[i])
                total += pairs(rows[i])
        out[f"rows to {length}"] = data._replace(train=mine)
    return out


def pairs(row: Any) -> int:
    return len(row) - row.start - 1


def trained(resolved: Resolved, rundir: RunDir, data: Data, start: Any) -> dict[str, Any]:
    write_json(rundir / "train" / "parent.json", {})
    vocab = vocabulary.draft(resolved, data, start)
    trainer = stage.Trainer(resolved, rundir, data, vocab, start)
    trainer.train()
    evals = [json.loads(line) for line in (rundir / "train" / "evals.jsonl").read_text().splitlines()]
    best = read_json(rundir / "drafter" / "best" / "metrics.json")
    before = next((e["contexts"] for e in evals if e["epoch"] == 0), None)
    return {
        "rows": len(data.train), "longest": max(map(len, data.train)), "supervised_tokens": trainer.supervised,
        "epoch": best["epoch"], "select_k": best["select_k"], "contexts": best["contexts"], "before": before,
    }  # fmt: skip


def show(rows: dict[str, Any]) -> None:
    """tau at select_k by range of contexts."""
    any_row = next(iter(rows.values()))
    ranges = [(c["from"], c["below"]) for c in any_row["contexts"]]
    print(f"{'tau by tokens of context':<28}" + "".join(f"{f'{a}-{b}':>12}" for a, b in ranges))
    named = {name: r["contexts"] for name, r in rows.items()}
    if any_row["before"]:
        named = {"before training": any_row["before"], **named}
    for name, found in named.items():
        values = "".join(f"{c['interval']['value']:>12.3f}" for c in found)
        print(f"{name:<28}{values}")


if __name__ == "__main__":
    main()
