"""What every benchmark shares: interleaved rounds, a table, a result file with machine, versions and settings."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from eyas import __version__
from eyas import target as targets
from eyas.engines.hf import HFEngine, choose_device, choose_dtype
from eyas.pipeline import machine

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def rounds(work: dict[str, Callable[[], int]], count: int) -> dict[str, list[float]]:
    """Tokens per second of each candidate, `count` times, interleaved, after one warm-up each."""
    for job in work.values():
        job()
    rates: dict[str, list[float]] = {name: [] for name in work}
    for i in range(count):
        names = list(work) if i % 2 == 0 else list(work)[::-1]
        for name in names:
            began = time.perf_counter()
            tokens = work[name]()
            rates[name].append(tokens / (time.perf_counter() - began))
    return rates


def report(name: str, baseline: str, rates: dict[str, list[float]], settings: dict[str, Any]) -> None:
    """Print medians and ratios of paired rounds, and write docs/results/NAME.json."""
    write(name, {"baseline": baseline, "rows": table(baseline, rates), "settings": settings})


def table(baseline: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Print medians and ratios of paired rounds, and return them."""
    print(f"{'':<28}{'tokens/s':>10}{'ratio':>8}   range of paired ratios")
    rows = {}
    for candidate, values in rates.items():
        ratios = [a / b for a, b in zip(values, rates[baseline], strict=True)]
        row = {
            "tokens_per_s": statistics.median(values),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
        rows[candidate] = row
        print(
            f"{candidate:<28}{row['tokens_per_s']:>10.1f}{row['ratio']:>8.3f}   {min(ratios):.3f} to {max(ratios):.3f}"
        )
    return rows


def write(name: str, figures: dict[str, Any]) -> None:
    """docs/results/NAME.json: figures, version, machine, date."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    body = {"benchmark": name, **figures}
    body |= {"eyas": __version__, "machine": machine(), "date": time.strftime("%Y-%m-%d")}
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path.relative_to(RESULTS.parents[1])}")


def engine_of(model: str) -> tuple[HFEngine, dict[str, Any]]:
    """The embedded engine with stop ids off, so that every answer has its full length; and what a result file says of it."""
    device = choose_device().value
    dtype = choose_dtype("auto", device).value
    target = targets.load(model)
    engine = HFEngine(target, dtype, device, [])
    engine.stop_ids = ()
    return engine, {
        "model": target.identity,
        "dtype": dtype,
        "device": device,
        "threads": torch.get_num_threads(),
    }


def plain(engine: HFEngine) -> Any:
    """The same model as transformers loads it, untouched by eyas."""
    parameter = next(engine.model.parameters())
    model = AutoModelForCausalLM.from_pretrained(
        engine.target.folder, dtype=parameter.dtype, local_files_only=True
    )
    return model.to(parameter.device).eval()


def library(model: Any, ids: torch.Tensor, tokens: int) -> int:
    """transformers' own greedy generate of exactly `tokens` tokens a row; returns how many were made."""
    ids = ids.to(model.device)
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
    return (out.shape[1] - ids.shape[1]) * len(ids)
