"""What drafting costs with an untrained drafter against a trained one of the same shape: does a profile foretell it?

    python benchmarks/drafting_cost.py RUN [--rounds 3] [--limit 8] [--max-tokens 48] [--keep DIR] [--set PATH=VALUE]

RUN is the folder of a finished run with vLLM. Five servers side by side for two values of k: the target alone, an untrained and the
trained drafter at each k. In a round all of them are measured at one load, then at the next. Writes docs/results/drafting-cost.json.
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
    parser.add_argument("--keep", type=Path, help="a folder for the raw rounds")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    a = parser.parse_args()
    resolved, rundir, _ = pipeline.open_run(a.run, a.sets, None)
    options = resolved.recipe.bench.model_copy(
        update={
            "rounds": a.rounds, "limit": a.limit, "max_tokens": a.max_tokens, "temperature": 0.0, "lengths": "fixed",
        }
    )  # fmt: skip
    resolved = replace(resolved, recipe=resolved.recipe.model_copy(update={"bench": options}))
    with tempfile.TemporaryDirectory() as folder:
        write("drafting-cost", measure(resolved, rundir, a.keep or Path(folder)))


def measure(resolved: Resolved, trained: RunDir, root: Path) -> dict:
    options = resolved.recipe.bench
    rows = [r for r in conversations.read(trained / "conversations") if r.split == "held_out"]
    rows = list(conversations.spread(rows, options.limit, lambda r: r.domain))
    asks = [Ask(r.row_id, r.domain, r.prompt_ids, None) for r in rows]
    untrained = RunDir(root / "untrained")
    profile.untrained(resolved, untrained)
    sides = {"untrained": untrained, "trained": trained}

    def session(name: str, load: int) -> Session:
        one = options.model_copy(update={"concurrency": [load]})
        return Session(
            root / name / "bench", one, asks, lambda n: end_to_end([r.prompt_ids for r in rows], n), 0.0
        )

    with contextlib.ExitStack() as stack:

        def place(name: str, k: int) -> Place:
            s = stack.enter_context(serve.running(resolved, sides[name], f"cost-{name}-k{k}", k))
            return Place(s.url, s.model, k, f"{s.engine}, {name}, k={k}", vllm.COUNTERS)

        plain = place("untrained", 0)
        places = {name: [plain, *(place(name, k) for k in options.k)] for name in sides}
        sessions = {(name, c): session(name, c) for name in sides for c in options.concurrency}
        for number in range(options.rounds):
            for c in options.concurrency:  # all servers at one load, one after another
                first, then = list(sides) if number % 2 else list(sides)[::-1]
                sessions[first, c].loads(places[first], [number])
                shared = sessions[then, c].round_file(0, c, number)  # both have the same plain round
                shared.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(sessions[first, c].round_file(0, c, number), shared)
                sessions[then, c].loads(places[then], [number])
        engine = plain.label
    cells = {
        name: [cell for c in options.concurrency for cell in sessions[name, c].figures(options.k, CONFIDENCE)]
        for name in sides
    }
    print(f"{'k':>3}{'load':>6}{'C untrained':>13}{'C trained':>12}{'ratio':>8}{'tau':>7}")
    out = []
    for mine, theirs in zip(cells["untrained"], cells["trained"], strict=True):
        k, c = mine["k"], mine["concurrency"]
        a, b = mine["C_decode"], theirs["C_decode"]
        ratio = a["value"] / b["value"]
        row = {"k": k, "concurrency": c, "C_untrained": a, "C_trained": b, "ratio": ratio}
        row |= {"with_prompts": [mine["C"], theirs["C"]]}
        out.append(row | {"tau_trained": theirs["tau"]["value"]})
        print(
            f"{k:>3}{c:>6}{a['value']:>13.2f}{b['value']:>12.2f}{ratio:>8.3f}{theirs['tau']['value']:>7.2f}"
        )
    about = {"engine": engine, "target": resolved.target.folder.name, "dtype": resolved.dtype}
    return {"rows": out, "settings": options.model_dump(mode="json") | about}


if __name__ == "__main__":
    main()
