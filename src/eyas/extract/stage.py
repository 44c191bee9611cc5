"""extract: conversations -> hidden states of the target.

Reads conversations/. Writes states/*.safetensors and manifest.json. Three ways, the first that can be is taken and said:

    generate   states that vLLM kept in the pass that generated (served.take)
    pass       vLLM reads the stored ids (served.read_again), by eyas's plugin or, with versions that it was not tried with, by vLLM's
               own connector; or the embedded engine does (embedded.read)

    eyas extract RECIPE
"""

import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from eyas.errors import ContractError, SurroundingsError, UsageError
from eyas.extract import embedded, served
from eyas.extract.head import Checker, Extracted, checker_of
from eyas.progress import duration, say
from eyas.recipe import Resolved
from eyas.rundir import RunDir
from eyas.servers import serve
from eyas.stores import conversations, states
from eyas.stores.conversations import Row
from eyas.target import Decision

WAYS: dict[str, Callable[[Resolved, RunDir, list[Row], Checker], Extracted]] = {
    "generate": served.take,
    "vllm": served.read_again,
    "connector": partial(served.read_again, own=True),
    "hf": embedded.read,
}
MIN_HEAD_AGREEMENT = 0.999
MIN_GREEDY_AGREEMENT = 0.98


def run(resolved: Resolved, rundir: RunDir) -> dict[str, Any]:
    """Get the states of every row; returns the manifest. Resumes after the last complete shard.

    Raises ContractError when states are not finite or a check falls below its threshold.
    """
    rows = list(conversations.read(rundir / "conversations"))
    way = choose(resolved, rundir)
    if resolved.recipe.engine.name != "hf":
        say(f"  {way.reason}")
    found = WAYS[way.value](resolved, rundir, rows, checker_of(resolved))
    agreement = _judge(found.counts)
    tokens = sum(len(r.ids) for r in rows)
    saved = _saved(rundir, tokens) if way.value == "generate" else None
    folder = rundir / "states"
    lost = states.round_trip(folder, found.shards)
    if lost:
        worst = max(lost)
        say(f"  aux states in fp8: relative error of the round trip {min(lost):.2%} to {worst:.2%} by layer")
    manifest = rundir.finish(
        "extract",
        {
            "content": found.shards,
            "with": "generate" if way.value == "generate" else "pass",
            "reason": way.reason,
            "aux_layers": resolved.aux_layers,
            "tokens": tokens,
            "saved_s": saved,
            "bytes": sum((folder / s["file"]).stat().st_size for s in found.shards),
            "round_trip_error": dict(zip(map(str, resolved.aux_layers), lost, strict=True)) if lost else None,
            "checks": dict(found.counts) | agreement | found.likeness,
            "rates": {"tokens_per_s": found.made / found.seconds if found.made else None},
        },
    )
    for leftover in (folder / "steps", rundir / str(served.KEPT)):
        shutil.rmtree(leftover, ignore_errors=True)
    return manifest


def _saved(rundir: RunDir, tokens: int) -> float | None:
    """Seconds that a second reading would have taken, at the rate of the embedded engine that plan measured."""
    rate = rundir.manifest("plan")["rates"]["pass_tokens_per_s"] if rundir.finished("plan") else None
    if rate:
        say(
            f"  a second reading of the {tokens:,} tokens would have taken the embedded engine some {duration(tokens / rate)}"
        )
    return tokens / rate if rate else None


def choose(resolved: Resolved, rundir: RunDir) -> Decision:
    """generate, vllm, connector or hf, and why. Raises UsageError where the recipe asks for states that were not kept."""
    engine, wanted = resolved.recipe.engine, resolved.recipe.extract.with_
    if engine.name == "hf":
        return Decision("hf", "the embedded engine reads the stored ids")
    missing = served.kept(resolved, rundir) if wanted != "pass" else "the recipe says so (extract.with)"
    if missing is None:
        return Decision(
            "generate", "states were kept in the pass that generated: nothing is read a second time"
        )
    if wanted == "generate":
        raise UsageError(
            f"extract.with is generate, and {missing}. Generate again with --from generate, or set extract.with to auto or pass."
        )
    try:
        why = serve.cannot_keep(resolved)
        if why is None:
            return Decision("vllm", f"vLLM reads the stored ids once more: {missing}")
        other = serve.cannot_connect(resolved)
        if other is None:
            said = f"vLLM's own connector reads the stored ids (extract_hidden_states): {missing}, and {why}"
            return Decision("connector", said)
        why += f"; its own extract_hidden_states: {other}"
    except SurroundingsError as e:
        why = str(e)
    return Decision("hf", f"the embedded engine reads the stored ids: {missing}, and vLLM cannot: {why}")


def _judge(counts: Counter[str]) -> dict[str, float]:
    """The agreements as shares; raises ContractError when one is too low to train on."""
    head = counts["head_agrees"] / counts["positions"]
    disk = 1 - counts["disk_differs"] / max(counts["positions"] - counts["disk_near_ties"], 1)
    out = {"head_agreement": head, "disk_agreement": disk}
    said = f"  states: head(norm(last state)) has the target's own argmax at {head:.3%} of {counts['positions']:,} positions"
    if counts["disk_near_ties"] or disk != head:
        said += f" (weights as read from disk: {disk:.3%}, {counts['disk_near_ties']:,} near ties apart)"
    if counts["greedy_positions"]:
        decided = counts["greedy_positions"] - counts["greedy_near_ties"]
        out["greedy_agreement"] = greedy = counts["greedy_agrees"] / max(decided, 1)
        said += f"; greedy answers repeat at {greedy:.3%} ({counts['greedy_near_ties']} near ties apart)"
    say(said)
    if min(head, disk) <= MIN_HEAD_AGREEMENT:
        raise ContractError(
            f"states: head(norm(last state)) has the target's argmax at only {min(head, disk):.2%} of positions (need over "
            f"{MIN_HEAD_AGREEMENT:.1%}). The last state is not the input of the final norm, or this family's norm or head "
            "differs from what eyas reads from the weights. Training on it would be silently wrong."
        )
    if out.get("greedy_agreement", 1.0) <= MIN_GREEDY_AGREEMENT:
        raise ContractError(
            f"states: greedy answers are repeated at only {out['greedy_agreement']:.2%} of positions (need over "
            f"{MIN_GREEDY_AGREEMENT:.0%}). The stored ids were not written by this target. Run generate again."
        )
    return out
