"""plan: what this run will cost, before it costs it: tokens, disk, memory and time, from rates measured here.

Reads the recipe, the target's facts and the prompts; writes profile.json (rates) and plan.json.

    eyas plan RECIPE
"""

import math
import shutil
from typing import Any

import psutil
from jinja2 import TemplateError

from eyas.contract import Norms, for_target
from eyas.errors import SurroundingsError
from eyas.progress import duration, say, size
from eyas.recipe import Resolved
from eyas.rundir import RunDir, write_json
from eyas.stores import states

DISK_MARGIN = 1.1
PROMPT_SAMPLE = 64  # prompts rendered to learn their length


def run(resolved: Resolved, rundir: RunDir, prompts: list[Any]) -> dict[str, Any]:
    """Count, measure, estimate; returns the manifest.

    Raises SurroundingsError when the disk cannot hold the run.
    """
    counts = _tokens(resolved, prompts)
    disk = _disk(resolved, counts)
    free = shutil.disk_usage(rundir.root).free
    need = sum(disk.values()) * DISK_MARGIN
    if need > free:
        raise SurroundingsError(
            f"plan: the run needs {size(need)} in {rundir.root} ({', '.join(f'{k} {size(v)}' for k, v in disk.items())}), and "
            f"{size(free)} are free. Free space, choose another disk with --run DIR, or lower prompts.limit, "
            "generate.samples or generate.max_tokens."
        )
    from eyas.plan import measure  # loads torch and the model: only once the disk is known to do

    say("  measuring this machine's rates …")
    rates = measure.rates(resolved, counts["prompt_tokens_each"])
    write_json(rundir / "profile.json", {"device": resolved.device, "dtype": resolved.dtype, "rates": rates})
    seconds = _seconds(resolved, counts, rates)
    memory = _memory(resolved, counts)
    _print(counts, disk, free, memory, seconds)
    return rundir.finish(
        "plan",
        {
            "content": None,
            "tokens": counts,
            "disk_bytes": disk,
            "memory_bytes": memory,
            "seconds": seconds,
            "rates": rates,
        },
    )


def _tokens(resolved: Resolved, prompts: list[Any]) -> dict[str, int]:
    """Answers and tokens, at most: every answer is counted at its length limit."""
    options = resolved.recipe.generate
    tokenizer = resolved.target.tokenizer(resolved.recipe.target.trust_remote_code)
    lengths = []
    for prompt in prompts[:: max(1, len(prompts) // PROMPT_SAMPLE)]:
        messages = [{"role": "user", "content": prompt.turns[0]}]
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        except (TemplateError, ValueError, TypeError):
            continue  # generate quarantines it with its reason
        lengths.append(len(ids))
    each = round(sum(lengths) / max(len(lengths), 1)) or 1
    train = sum(len(p.turns) for p in prompts if not p.held_out) * options.samples
    held = sum(len(p.turns) for p in prompts if p.held_out)
    return {
        "answers_train": train,
        "answers_held_out": held,
        "prompt_tokens_each": each,
        "completion_tokens": (train + held) * options.max_tokens,
        "row_tokens": (train + held) * (each + options.max_tokens),
        "supervised_tokens": train * (options.max_tokens - 1),
    }


def _parameters(resolved: Resolved) -> int:
    from eyas.drafter import dialects

    options = resolved.recipe.train
    norms = Norms(**options.norms.model_dump())
    contract = for_target(
        resolved.target, resolved.aux_layers, norms, options.draft_vocab, options.ttt_steps, 0
    )
    return sum(math.prod(s) for name, s in dialects.shapes(contract).items() if name not in ("d2t", "t2d"))


def _disk(resolved: Resolved, counts: dict[str, int]) -> dict[str, int]:
    aux = 2 if resolved.recipe.extract.dtype == "bfloat16" else 4
    last = 2 if resolved.dtype == "bfloat16" else 4
    per_token = states.bytes_per_token(len(resolved.aux_layers), resolved.target.hidden, aux, last)
    parameters = _parameters(resolved)
    return {
        "conversations": counts["row_tokens"] * 4,
        "states": counts["row_tokens"] * per_token,
        "drafters": parameters * 2 * (resolved.recipe.train.epochs + 1),
        "training state": parameters * 12,
    }


def _memory(resolved: Resolved, counts: dict[str, int]) -> dict[str, int]:
    """Peak by stage, roughly: weights, states held while training, optimizer (16 bytes a parameter)."""
    weights = sum(p.stat().st_size for p in set(resolved.target.files.values()))
    loaded = weights * (
        2 if resolved.dtype == "float32" and resolved.target.config.get("dtype") == "bfloat16" else 1
    )
    embedding = resolved.target.vocab * resolved.target.hidden * 4
    training = _parameters(resolved) * 16 + _disk(resolved, counts)["states"] + 2 * embedding
    return {"target": loaded, "train": training, "available": psutil.virtual_memory().available}


def _seconds(resolved: Resolved, counts: dict[str, int], rates: dict[str, float]) -> dict[str, float]:
    """At most, since answers are counted at their length limit."""
    bench, train = resolved.recipe.bench, resolved.recipe.train
    measured = min(bench.limit or counts["answers_held_out"], counts["answers_held_out"])
    answers = bench.rounds * measured * (1 + len(bench.k))
    return {
        "generate": counts["completion_tokens"] / rates["decode_tokens_per_s"],
        "extract": counts["row_tokens"] / rates["pass_tokens_per_s"],
        "train": counts["supervised_tokens"] * train.epochs / rates["supervised_tokens_per_s"],
        "bench": answers * bench.max_tokens / rates["bench_tokens_per_s"],
    }


def _print(
    counts: dict[str, int], disk: dict[str, int], free: int, memory: dict[str, int], seconds: dict[str, float]
) -> None:
    say(
        f"  tokens, at most: {counts['completion_tokens']:,} to generate ({counts['answers_train']} training and "
        f"{counts['answers_held_out']} held-out answers), {counts['supervised_tokens']:,} supervised"
    )
    say(f"  disk: {', '.join(f'{name} {size(n)}' for name, n in disk.items())}; {size(free)} free")
    say(
        f"  memory: target {size(memory['target'])}, training {size(memory['train'])}; {size(memory['available'])} available"
    )
    parts = ", ".join(f"{name} {duration(s)}" for name, s in seconds.items())
    say(f"  time, at most, at the rates just measured: {parts}; {duration(sum(seconds.values()))} in all")
