"""What drafting costs before a drafter is trained: the recipe's engine, loads and k with an UNTRAINED drafter of the recipe's shape.

Writes profile.json, and the raw rounds to profile/. A profile of the same target, engine, device and shape is not measured again.

    eyas plan RECIPE --profile
"""

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jinja2 import TemplateError

from eyas import profiles, warm
from eyas.bench import embedded, measure
from eyas.bench.load import Ask, Place, end_to_end
from eyas.bench.session import Session
from eyas.drafter import disk
from eyas.drafter.architectures import build
from eyas.engines import vllm
from eyas.engines.hf import HFEngine
from eyas.errors import UsageError
from eyas.progress import say
from eyas.recipe import Resolved
from eyas.rundir import RunDir, read_json, write_json
from eyas.servers import serve
from eyas.stores import conversations
from eyas.stores.conversations import Row

LIMIT, ROUNDS, TOKENS = 8, 1, 48  # at most, of the recipe's own: a step's cost needs few answers


def run(resolved: Resolved, rundir: RunDir, prompts: Sequence[Any]) -> dict[str, Any]:
    """Measure C(k, b), or find it measured; returns profile.json. Raises UsageError without prompts."""
    found = profiles.read(rundir, resolved)
    if found and found["engine"] == _engine(resolved):
        wanted = {(k, b) for k in resolved.recipe.bench.k for b in resolved.recipe.bench.concurrency}
        if wanted <= {(c.k, c.concurrency) for c in profiles.costs(found)}:
            say("  profile: measured already")
            return found
    small = resolved.recipe.bench.model_copy(
        update={
            "limit": min(resolved.recipe.bench.limit or LIMIT, LIMIT),
            "rounds": ROUNDS,
            "max_tokens": min(resolved.recipe.bench.max_tokens, TOKENS),
            "temperature": 0.0,
        }
    )
    resolved = replace(resolved, recipe=resolved.recipe.model_copy(update={"bench": small}))
    work = RunDir(rundir / "profile")
    about = {"key": profiles.key(resolved), "bench": small.model_dump(mode="json")}
    if not (work / "about.json").is_file() or read_json(work / "about.json") != about:
        shutil.rmtree(work.root, ignore_errors=True)
        write_json(work / "about.json", about)
    rows = _rows(resolved, prompts)
    if not (work / "drafter").is_dir():
        untrained(resolved, work)
    engine, cells = (_embedded if resolved.recipe.engine.name == "hf" else _served)(resolved, work, rows)
    made = {
        "key": about["key"],
        "engine": engine,
        "dtype": resolved.dtype,
        "device": resolved.device,
        "prompts": len(rows),
        "costs": [
            {
                "k": c["k"],
                "concurrency": c["concurrency"],
                "C": c["C_decode"] or c["C"],
                "tau": c["tau"]["value"],
            }
            for c in cells
        ],
    }
    write_json(rundir / profiles.FILE, made)
    shutil.rmtree(work / "drafter")
    return made


def _engine(resolved: Resolved) -> str:
    """The engine with its version: another one may cost otherwise."""
    options = resolved.recipe.engine
    return "hf" if options.name == "hf" else vllm.find(options.python, options.command).label


def untrained(resolved: Resolved, work: RunDir) -> None:
    """drafter/best of the recipe's shape with random weights; it costs what a trained one costs, and is accepted next to never."""
    c = warm.contract(resolved, resolved.target.context)
    drafter = build(c)
    head = torch.randn(c.draft_vocab, c.hidden, generator=torch.Generator().manual_seed(0)) * 0.02
    drafter.reset(0, torch.arange(c.draft_vocab), head, torch.ones(c.hidden))
    begun = work / "drafter.new"  # renamed when it is whole: a kill may come in between
    shutil.rmtree(begun, ignore_errors=True)
    disk.write(begun / "best", drafter, {"epoch": 0, "tau": {}})
    begun.rename(work / "drafter")


def _rows(resolved: Resolved, prompts: Sequence[Any]) -> list[Row]:
    """The prompts that are measured, as ids: held-out ones first, evenly over the domains."""
    tokenizer = resolved.target.tokenizer(resolved.recipe.target.trust_remote_code)
    bench = resolved.recipe.bench
    known = [p for p in prompts if p.held_out] or list(prompts)
    out = []
    for p in conversations.spread(known, bench.limit, lambda p: p.domain):
        messages = [{"role": "system", "content": p.system}] * (p.system is not None)
        messages = [*messages, {"role": "user", "content": p.turns[0]}]
        try:
            made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except (TemplateError, ValueError, TypeError):
            continue  # generate quarantines it with its reason
        ids = made["input_ids"]
        if len(ids) + bench.max_tokens < resolved.target.context:
            out.append(_row(p, list(ids)))
    if not out:
        raise UsageError(
            "plan --profile: there is no prompt to measure with; give prompts.sources a file, even a small one"
        )
    return out


def _row(prompt: Any, ids: list[int]) -> Row:
    return Row(
        row_id=prompt.prompt_id, prompt_id=prompt.prompt_id, prompt_key="", domain=prompt.domain, split="held_out",
        turn=0, sample=0, prompt_ids=ids, completion_ids=[], finish_reason="", temperature=0.0, top_p=1.0,
        target="",
    )  # fmt: skip


def _embedded(resolved: Resolved, work: RunDir, rows: list[Row]) -> tuple[str, list[dict[str, Any]]]:
    code = resolved.recipe.target.trust_remote_code
    engine = HFEngine(resolved.target, resolved.dtype, resolved.device, resolved.aux_layers, code)
    drafter = disk.read(work / "drafter" / "best", getattr(torch, resolved.dtype), resolved.device)
    requests = embedded.Bench(resolved, engine, drafter, rows).measure(work)
    return "hf", measure.cells(requests, resolved.recipe.verdict.confidence)


def _served(resolved: Resolved, work: RunDir, rows: list[Row]) -> tuple[str, list[dict[str, Any]]]:
    options = resolved.recipe.bench
    asks = [Ask(r.row_id, r.domain, r.prompt_ids, None) for r in rows]
    session = Session(
        work / "bench", options, asks, lambda n: end_to_end([r.prompt_ids for r in rows], n), 0.0
    )
    ks = [0, *options.k]
    together = serve.fit_together(resolved, len(ks)).value
    engine = ""
    for group in [ks] if together else [[k] for k in ks]:
        with contextlib.ExitStack() as stack:
            places = []
            for k in group:
                s = stack.enter_context(serve.running(resolved, work, f"profile-k{k}", k))
                places.append(Place(s.url, s.model, k, f"{s.engine} with k={k}", vllm.COUNTERS))
                engine = s.engine
            session.loads(places, range(options.rounds))
    return engine, session.figures(options.k, resolved.recipe.verdict.confidence)
