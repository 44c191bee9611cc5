"""A good drafter, broken in ways that an engine does not mention: what vLLM makes of each, beside what eyas check says of it.

    python benchmarks/silent_faults.py RUN [--k 3] [--limit 12] [--max-tokens 48] [--only NAME] [--set PATH=VALUE]

RUN is the folder of a finished run with vLLM. Every variant is checked as anybody's folder (without eyas's contract.json), then served,
and answers the same held-out prompts greedily; tau is from the server's counters. Writes docs/results/silent-faults.json.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from common import write

from eyas import pipeline
from eyas.bench import load
from eyas.bench.load import Ask, Load, Place
from eyas.check import engine_rules, stage
from eyas.convert import convert
from eyas.drafter.dialects import IDS
from eyas.engines import vllm
from eyas.errors import SurroundingsError
from eyas.recipe import Resolved
from eyas.rundir import RunDir
from eyas.servers import serve
from eyas.stores import conversations, weights

CONCURRENCY = 4


@dataclass
class Variant:
    """to: the dialect that it is converted to first. config, tensors: edits, in place."""

    name: str
    to: str = "vllm"
    config: Callable[[dict], object] = lambda c: None
    tensors: Callable[[dict], object] = lambda t: None


VARIANTS = (
    Variant("as it was trained"),
    Variant("converted to speculators", "speculators"),
    Variant("aux layers one too early", config=lambda c: c.update({IDS: [i - 1 for i in c[IDS]], "eagle_config": None})),
    Variant("aux layers left out", config=lambda c: [c.pop(IDS), c.pop("eagle_config", None)]),
    Variant("aux layers in eagle_config alone", "sglang"),
    Variant("norm_before_residual left out", "speculators", lambda c: c.pop("norm_before_residual")),
    Variant("norm_output turned on", config=lambda c: c.update(norm_output=True)),
    Variant("fc_norm left out", config=lambda c: c.pop("fc_norm")),
    Variant("fc_norm left out, and its tensors", config=lambda c: c.pop("fc_norm"), tensors=lambda t: [t.pop(n) for n in list(t) if n.startswith("fc_norm")]),
    Variant("d2t left out", tensors=lambda t: [t.pop(n) for n in ("d2t", "t2d")]),
    Variant("rope_theta left out", config=lambda c: c.pop("rope_theta")),
    Variant("k_proj left out", tensors=lambda t: t.pop("midlayer.self_attn.k_proj.weight")),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument(
        "--only", action="append", help="of the variants, those whose name holds this; may be repeated"
    )
    parser.add_argument("--set", action="append", default=[], dest="sets")
    a = parser.parse_args()
    resolved, rundir, _ = pipeline.open_run(a.run, a.sets, None)
    rows = [r for r in conversations.read(rundir / "conversations") if r.split == "held_out"]
    asks = [
        Ask(r.row_id, r.domain, r.prompt_ids, None)
        for r in conversations.spread(rows, a.limit, lambda r: r.domain)
    ]
    engine = vllm.find(resolved.recipe.engine.python, resolved.recipe.engine.command)
    version = engine.version
    out = []
    with tempfile.TemporaryDirectory() as folder:
        for variant in VARIANTS:
            if a.only is None or any(part in variant.name for part in a.only):
                place = RunDir(Path(folder) / str(len(out)))
                make(variant, rundir / "drafter" / "best", place, resolved)
                out.append(
                    {
                        "variant": variant.name,
                        **checked(place, resolved, engine),
                        **served(place, resolved, asks, a),
                    }
                )
                print(
                    f"{variant.name:<36} tau {out[-1]['tau'] or 0:.2f}  {out[-1]['vllm'][:60]:<60}  {out[-1]['eyas check']}",
                    flush=True,
                )
    settings = {
        "engine": f"vLLM {version}",
        "device": resolved.device,
        "k": a.k,
        "prompts": len(asks),
        "max_tokens": a.max_tokens,
    }
    write("silent-faults", {"rows": out, "settings": settings})


def make(variant: Variant, source: Path, place: RunDir, resolved: Resolved) -> None:
    """place/drafter/best, as the variant has it."""
    best = place / "drafter" / "best"
    best.parent.mkdir(parents=True)
    convert(source, best, variant.to, None, resolved.target)
    config = json.loads((best / "config.json").read_text())
    variant.config(config)
    (best / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    tensors = dict(weights.opened(best).tensors)
    before = set(tensors)
    variant.tensors(tensors)
    if set(tensors) != before:
        weights.write(best / "new", tensors)
        (best / "new").rename(best / "model.safetensors")


def checked(place: RunDir, resolved: Resolved, engine: vllm.Installed) -> dict:
    """What eyas check says of the folder without its contract, as it would come from somebody else."""
    alone = place / "alone"
    shutil.copytree(place / "drafter" / "best", alone)
    (alone / "contract.json").unlink()
    asked = engine_rules.named("vllm", engine.version)._replace(device=engine.device)
    found, _ = stage.check(alone, resolved.target, asked)
    bad = [f for f in found if f.severity != "info"]
    counts = {s: sum(f.severity == s for f in bad) for s in ("error", "warning", "unknown")}
    said = ", ".join(f"{n} {s}" for s, n in counts.items() if n) or "nothing"
    return {
        "eyas check": said,
        "findings": [f"{f.severity}: [{f.rule}] {f.message.replace(f'{alone}', 'DIR')}" for f in bad],
    }


def served(place: RunDir, resolved: Resolved, asks: list[Ask], a: argparse.Namespace) -> dict:
    try:
        with serve.running(resolved, place, "faults", a.k) as s:
            there = Place(s.url, s.model, a.k, "vLLM", vllm.COUNTERS)
            made = load.measure(there, asks, Load(CONCURRENCY, a.max_tokens, 0.0, True), 0, 600.0)
    except SurroundingsError as e:
        return {"vllm": f"did not start: {str(e)[:300]}", "tau": None}
    if made.counters is None:
        raise SystemExit("the server has no counters")
    accepted = sum(made.counters.accepted_at.values())
    return {"vllm": "started, and said nothing", "tau": 1 + accepted / made.counters.drafts}


if __name__ == "__main__":
    main()
