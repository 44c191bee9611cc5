"""What drafting costs with an untrained drafter against a trained one of the same shape: does a profile foretell it?

    python benchmarks/drafting_cost.py RUN [--rounds 3] [--limit 8] [--max-tokens 48] [--set PATH=VALUE]

RUN is the folder of a finished run with vLLM. Five servers side by side for two values of k: the target alone, an untrained and the
trained drafter at each k. Every round goes through all loads on all of them. Writes docs/results/drafting-cost.json.
"""

import argparse
import contextlib
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from common import write

from eyas import pipeline
from eyas.bench import profile
from eyas.bench.load import Ask, Place, end_to_end
from eyas.bench.session import Session
from eyas.engines import vllm
from eyas.recipe import Resolved
from eyas.rundir import RunDir
from eyas.servers import serve
from eyas.stores import conversations

CONFIDENCE = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=profile.LIMIT)
    parser.add_argument("--max-tokens", type=int, default=profile.TOKENS)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    a = parser.parse_args()
    resolved, rundir, _ = pipeline.open_run(a.run, a.sets, None)
    options = resolved.recipe.bench.model_copy(
        update={
            "rounds": a.rounds, "limit": a.limit, "max_tokens": a.max_tokens, "temperature": 0.0, "lengths": "fixed",
        }
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        resolved = replace(resolved, recipe=resolved.recipe.model_copy(update={"bench": options}))
        write("drafting-cost", measure(resolved, rundir, Path(folder)))


def measure(resolved: Resolved, trained: RunDir, root: Path) -> dict:
    options = resolved.recipe.bench
    rows = [r for r in conversations.read(trained / "conversations") if r.split == "held_out"]
    rows = list(conversations.spread(rows, options.limit, lambda r: r.domain))
    asks = [Ask(r.row_id, r.domain, r.prompt_ids, None) for r in rows]
    untrained = RunDir(root / "untrained")
    profile.untrained(resolved, untrained)
    sides = {"untrained": untrained, "trained": trained}
    sessions = {
        name: Session(
            root / name / "bench", options, asks, lambda n: end_to_end([r.prompt_ids for r in rows], n), 0.0
        )
        for name in sides
    }
    with contextlib.ExitStack() as stack:

        def place(name: str, k: int) -> Place:
            s = stack.enter_context(serve.running(resolved, sides[name], f"cost-{name}-k{k}", k))
            return Place(s.url, s.model, k, f"{s.engine}, {name}, k={k}", vllm.COUNTERS)

        plain = place("untrained", 0)
        places = {name: [plain, *(place(name, k) for k in options.k)] for name in sides}
        for number in range(options.rounds):
            for name, other in (("untrained", "trained"), ("trained", "untrained"))[:: 1 - 2 * (number % 2)]:
                for c in options.concurrency:  # both have the same plain rounds
                    there = sessions[other].round_file(0, c, number)
                    if there.is_file():
                        sessions[name].folder.mkdir(parents=True, exist_ok=True)
                        shutil.copy(there, sessions[name].round_file(0, c, number))
                sessions[name].loads(places[name], [number])
        engine = plain.label
    cells = {name: s.figures(options.k, CONFIDENCE) for name, s in sessions.items()}
    print(f"{'k':>3}{'load':>6}{'C untrained':>13}{'C trained':>12}{'ratio':>8}{'tau':>7}")
    out = []
    for mine, theirs in zip(cells["untrained"], cells["trained"], strict=True):
        ratio = mine["C"]["value"] / theirs["C"]["value"]
        out.append(
            {
                "k": mine["k"], "concurrency": mine["concurrency"], "C_untrained": mine["C"], "C_trained": theirs["C"],
                "tau_trained": theirs["tau"]["value"], "ratio": ratio,
            }
        )  # fmt: skip
        print(
            f"{mine['k']:>3}{mine['concurrency']:>6}{mine['C']['value']:>13.2f}{theirs['C']['value']:>12.2f}{ratio:>8.3f}{theirs['tau']['value']:>7.2f}"
        )
    settings = options.model_dump(mode="json") | {
        "engine": engine,
        "target": resolved.target.folder.name,
        "dtype": resolved.dtype,
    }
    return {"rows": out, "settings": settings}


if __name__ == "__main__":
    main()
