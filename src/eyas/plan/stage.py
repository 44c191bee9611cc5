"""plan: what this run will cost, before it costs it: tokens, disk, memory and time.

Reads the recipe, the target's facts and the prompts; measures this machine's rates where the target is here, and takes
target.facts and its rates where it is not. Writes plan.json. What drafting
costs is measured by bench/profile.py (eyas plan --profile).

    eyas plan RECIPE
"""

import math
import shutil
from typing import Any

import psutil
from jinja2 import TemplateError

from eyas import warm
from eyas.errors import SurroundingsError
from eyas.progress import duration, say, size
from eyas.recipe import Resolved
from eyas.rundir import RunDir
from eyas.schema import FactsSection
from eyas.stores import states

DISK_MARGIN = 1.1
MEASURED_PROMPT = 256  # tokens; longer ones would make measuring slow without changing the rates much
PROMPT_SAMPLE = 64  # prompts rendered to learn their length
LARGE_STATES = 10e9  # bytes from which it is worth saying what would make them smaller
RATES = ("decode_tokens_per_s", "pass_tokens_per_s", "supervised_tokens_per_s", "bench_tokens_per_s")


def run(resolved: Resolved, rundir: RunDir, prompts: list[Any]) -> dict[str, Any]:
    """Count, measure, estimate; returns the manifest.

    Raises SurroundingsError when the disk cannot hold the run, saying what would fit.
    """
    facts = resolved.recipe.target.facts
    here = bool(resolved.target.files)
    counts = _tokens(resolved, prompts) if here or facts is None else _tokens_of_facts(resolved, facts)
    disk = _disk(resolved, counts)
    free = shutil.disk_usage(rundir.root).free
    _print_counts(counts, disk, free, resolved)
    if here:
        _refuse_what_does_not_fit(resolved, rundir, counts, disk, free)
        rates = _measured(resolved, counts)
    else:
        rates = {name: getattr(facts.rates, name) if facts else None for name in RATES}
    seconds = _seconds(resolved, counts, rates)
    memory = _memory(resolved, counts)
    training = "not counted (latent attention)"
    if memory["train"] is not None:
        training = f"{size(memory['train'])} (weights and optimizer {size(memory['train_weights'])})"
    say(
        f"  memory: target {size(memory['target'])}, training {training}; {size(memory['available'])} available here"
    )
    _print_seconds(seconds, "just measured" if here else "that the recipe gives")
    if here and resolved.recipe.engine.name != "hf":
        say(
            f"  generate and bench run in {resolved.recipe.engine.name}, whose rates are known only once it runs"
        )
    if disk["states"] > LARGE_STATES:
        _print_savings(resolved, counts, seconds["extract"])
    if not here and sum(disk.values()) * DISK_MARGIN > free:
        say(f"  here it would not fit: {_what_fits(resolved, counts, disk, free)}")
    body: dict[str, Any] = {
        "tokens": counts,
        "disk_bytes": disk,
        "memory_bytes": memory,
        "seconds": seconds,
        "rates": rates,
    }
    body |= {"break_even": _break_even(resolved)}
    return rundir.finish(
        "plan", {"content": None, "state_bytes_per_token": resolved.token_bytes - states.ID_BYTES, **body}
    )


def _tokens(resolved: Resolved, prompts: list[Any]) -> dict[str, int]:
    """Answers and tokens, at most: every answer is counted at its length limit."""
    options = resolved.recipe.generate
    tokenizer = resolved.target.tokenizer(resolved.recipe.target.trust_remote_code)
    lengths = []
    for prompt in prompts[:: max(1, len(prompts) // PROMPT_SAMPLE)]:
        messages = [{"role": "user", "content": prompt.turns[0]}]
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, **options.template
            )["input_ids"]
        except (TemplateError, ValueError, TypeError):
            continue  # generate quarantines it with its reason
        if len(ids) + options.max_tokens <= resolved.target.context:  # generate leaves out the longer ones
            lengths.append(len(ids))
    each = round(sum(lengths) / max(len(lengths), 1)) or 1
    train = sum(len(p.turns) for p in prompts if not p.held_out) * options.samples
    held = sum(len(p.turns) for p in prompts if p.held_out)
    own = sum(s.self_ or 0 for s in resolved.recipe.prompts.sources)
    held_own = round(own * resolved.recipe.prompts.held_out)
    return _count(train + (own - held_own) * options.samples, held + held_own, each, options.max_tokens)


def _tokens_of_facts(resolved: Resolved, facts: FactsSection) -> dict[str, int]:
    held = round(facts.answers * resolved.recipe.prompts.held_out)
    return _count(facts.answers - held, held, facts.prompt_tokens, facts.row_tokens - facts.prompt_tokens)


def _count(train: int, held: int, prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "answers_train": train,
        "answers_held_out": held,
        "prompt_tokens_each": prompt_tokens,
        "completion_tokens": (train + held) * completion_tokens,
        "row_tokens": (train + held) * (prompt_tokens + completion_tokens),
        "supervised_tokens": train * (completion_tokens - 1),
    }


def _parameters(resolved: Resolved) -> int:
    from eyas.drafter import shapes

    wanted = shapes.of_contract(warm.contract(resolved, 0))
    return sum(math.prod(s) for name, s in wanted.items() if name not in ("d2t", "t2d"))


def _disk(resolved: Resolved, counts: dict[str, int]) -> dict[str, int]:
    parameters = _parameters(resolved)
    return {
        "conversations": counts["row_tokens"] * 4,
        "states": _state_bytes(resolved, counts, resolved.recipe.extract.dtype),
        "drafters": parameters * 2 * (resolved.recipe.train.epochs + 1),
        "training state": parameters * 12,
    }


def _state_bytes(resolved: Resolved, counts: dict[str, int], dtype: str) -> int:
    """A prompt's tokens have no last state."""
    hidden, last = resolved.target.hidden, resolved.last_bytes
    each = states.bytes_per_token(len(resolved.aux_layers), hidden, dtype, last)
    return counts["row_tokens"] * each - (counts["row_tokens"] - counts["completion_tokens"]) * hidden * last


def _refuse_what_does_not_fit(
    resolved: Resolved, rundir: RunDir, counts: dict[str, int], disk: dict[str, int], free: int
) -> None:
    need = sum(disk.values()) * DISK_MARGIN
    if need > free:
        raise SurroundingsError(
            f"plan: the run needs {size(need)} in {rundir.root} "
            f"({', '.join(f'{name} {size(n)}' for name, n in disk.items())}), and {size(free)} are free. "
            f"{_what_fits(resolved, counts, disk, free)}"
        )


def _what_fits(resolved: Resolved, counts: dict[str, int], disk: dict[str, int], free: int) -> str:
    """How many answers the free space holds, in the words of the recipe."""
    answers = counts["answers_train"] + counts["answers_held_out"]
    fixed = disk["drafters"] + disk["training state"]
    per_answer = (disk["conversations"] + disk["states"]) / answers
    fit = int(max(0, free / DISK_MARGIN - fixed) / per_answer)
    if not fit:
        return (
            "Not even one answer fits beside the drafters; free space, or choose another disk with --run DIR."
        )
    return (
        f"{fit:,} of {answers:,} answers would fit: set prompts.limit (or generate.samples, generate.max_tokens) lower, "
        "free space, or choose another disk with --run DIR."
    )


def _measured(resolved: Resolved, counts: dict[str, int]) -> dict[str, float | None]:
    from eyas.plan import measure  # loads torch and the model: only once the disk is known to do

    say("  measuring this machine's rates …")
    return measure.rates(resolved, min(counts["prompt_tokens_each"], MEASURED_PROMPT))


def _memory(resolved: Resolved, counts: dict[str, int]) -> dict[str, Any]:
    """Peak by stage: the target's weights, and training as drafter/memory.py counts it. Where the target is not here, training is
    counted as on a GPU in bfloat16."""
    from eyas.drafter import gradients, memory
    from eyas.feed import DEPTH

    facts, options = resolved.recipe.target.facts, resolved.recipe.train
    here = bool(resolved.target.files)
    device = resolved.device if here else "cuda"
    together = gradients.BATCH_TOKENS[device] if options.micro_tokens == "auto" else options.micro_tokens
    keys = min(together, options.tokens_per_step)
    answered = counts["completion_tokens"] / max(counts["row_tokens"], 1)
    size = gradients.product_dtype(resolved.device, resolved.dtype).itemsize if here else 2
    waiting = math.ceil(options.tokens_per_step / keys) * (2 + DEPTH)  # in hand, in the making, and ahead
    found = memory.of_training(
        warm.contract(resolved, 0), keys, round(keys * answered), options.ttt_steps, waiting, size
    )
    return {
        "target": resolved.weight_bytes or (facts.weight_bytes if facts else 0),
        "train": found and found.peak,
        "train_weights": found and found.weights,
        "available": _available(device),
    }


def _available(device: str) -> int:
    import torch

    if device == "cuda" and torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return psutil.virtual_memory().available


def _seconds(
    resolved: Resolved, counts: dict[str, int], rates: dict[str, float | None]
) -> dict[str, float | None]:
    """At most, since answers are counted at their length limit; None where the rate is unknown."""
    bench, train = resolved.recipe.bench, resolved.recipe.train
    measured = min(bench.limit or counts["answers_held_out"], counts["answers_held_out"])
    amounts = {
        "generate": (counts["completion_tokens"], "decode_tokens_per_s"),
        "extract": (counts["row_tokens"], "pass_tokens_per_s"),
        "train": (counts["supervised_tokens"] * train.epochs, "supervised_tokens_per_s"),
        "bench": (bench.rounds * measured * (1 + len(bench.k)) * bench.max_tokens, "bench_tokens_per_s"),
    }
    return {name: amount / rate if (rate := rates[by]) else None for name, (amount, by) in amounts.items()}


def _print_counts(counts: dict[str, int], disk: dict[str, int], free: int, resolved: Resolved) -> None:
    per_token = resolved.token_bytes - states.ID_BYTES
    say(
        f"  tokens, at most: {counts['completion_tokens']:,} to generate ({counts['answers_train']:,} training and "
        f"{counts['answers_held_out']:,} held-out answers), {counts['supervised_tokens']:,} supervised"
    )
    say(
        f"  disk: {', '.join(f'{name} {size(n)}' for name, n in disk.items())}; {size(free)} free "
        f"({per_token:,} B of states a token of an answer, {per_token - resolved.target.hidden * resolved.last_bytes:,} of a prompt)"
    )


def _print_seconds(seconds: dict[str, float | None], origin: str) -> None:
    parts = ", ".join(f"{name} {duration(s) if s else 'unknown'}" for name, s in seconds.items())
    known = [s for s in seconds.values() if s]
    if not known:
        say("  time: unknown without rates; give target.facts.rates, or plan where the model is")
        return
    unknown = "" if len(known) == len(seconds) else " without the unknown"
    say(f"  time, at most, at the rates {origin}: {parts}; {duration(sum(known))} in all{unknown}")


def _print_savings(resolved: Resolved, counts: dict[str, int], extract_s: float | None) -> None:
    """What would make them smaller, or spare their second reading."""
    saved = f" and the {duration(extract_s)} of extract" if extract_s else ""
    if not resolved.fp8:
        say(f"  with extract.dtype fp8 the states would take {size(_state_bytes(resolved, counts, 'fp8'))}")
    if resolved.recipe.engine.name == "hf":
        kept = "with engine.name vllm they are kept while generating (one pass), which saves"
    else:
        kept = "where eyas starts the server itself they are kept while it generates (one pass), which saves"
    say(f"  {kept} the second reading of every token{saved}")


def _break_even(resolved: Resolved) -> list[dict[str, float]]:
    """What acceptance pays, by the recipe's own cost ratios; `eyas plan --profile` measures them."""
    facts = resolved.recipe.target.facts
    out = []
    for k, cost in sorted((facts.rates.cost_ratios if facts else {}).items()):
        out.append({"k": k, "tau": cost, "accepted": (cost - 1) / k})
        say(
            f"  drafting {k} costs {cost:.2f} plain steps, as the recipe says: {cost:.2f} tokens a step break even, {(cost - 1) / k:.0%} of the "
            f"drafts accepted; 1.05x needs {1.05 * cost:.2f}"
        )
    return out
