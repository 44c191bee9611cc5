"""Rates of this machine for this target, measured in some seconds: decoding, reading, training."""

import time
from collections.abc import Callable

import torch

from eyas import warm
from eyas.drafter.architectures import build
from eyas.drafter.autograd import Autograd
from eyas.drafter.batch import pack
from eyas.drafter.decode import decode
from eyas.drafter.gradients import Gradients, product_dtype, row_multiple
from eyas.drafter.loss import Teacher
from eyas.engines.hf import HFEngine
from eyas.recipe import Resolved
from eyas.stores.states import RowStates

DECODE_TOKENS = 12
PASS_TOKENS = {"cpu": 512, "cuda": 16384}  # as much as keeps the device busy
TRAIN_ROWS, TRAIN_ROW_TOKENS = {"cpu": 6, "cuda": 64}, 128


def rates(resolved: Resolved, prompt_tokens: int) -> dict[str, float | None]:
    """decode_tokens_per_s (batch of generate.concurrency) and bench_tokens_per_s (one request), None where a server answers;
    pass_tokens_per_s; supervised_tokens_per_s (training at the recipe's TTT steps)."""
    recipe = resolved.recipe
    engine = HFEngine(
        resolved.target, resolved.dtype, resolved.device, resolved.aux_layers, recipe.target.trust_remote_code
    )
    prompt = torch.randint(
        3, resolved.target.vocab, (prompt_tokens,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    decoding: dict[str, float | None] = {"decode_tokens_per_s": None, "bench_tokens_per_s": None}
    if recipe.engine.name == "hf":
        decoding = _decoding(engine, recipe.generate.concurrency, prompt)
    rows_read = [prompt] * (PASS_TOKENS[resolved.device] // len(prompt) + 1)
    passed = timed(lambda: engine.states(rows_read).top1_BT.cpu())
    trained = timed(_training(resolved))
    return {
        **decoding,
        "pass_tokens_per_s": len(prompt) * len(rows_read) / passed,
        "supervised_tokens_per_s": TRAIN_ROWS[resolved.device] * TRAIN_ROW_TOKENS / 2 / trained,
    }


def _decoding(engine: HFEngine, rows: int, prompt: list[int]) -> dict[str, float | None]:
    never = HFEngineNeverStops(engine)
    batch = timed(lambda: never.generate(rows, prompt))
    one = timed(lambda: decode(never.engine, None, None, prompt, 0, DECODE_TOKENS))
    return {"decode_tokens_per_s": rows * DECODE_TOKENS / batch, "bench_tokens_per_s": DECODE_TOKENS / one}


class HFEngineNeverStops:
    """The engine with stop ids off, so that random prompts decode their full length."""

    def __init__(self, engine: HFEngine) -> None:
        self.engine = engine
        engine.stop_ids = ()

    def generate(self, rows: int, prompt: list[int]) -> None:
        self.engine.generate(
            [prompt] * rows, DECODE_TOKENS, [0.0] * rows, 1.0, [torch.zeros(DECODE_TOKENS).numpy()] * rows
        )


def timed(work: Callable[[], object]) -> float:
    """Seconds of the second run; the first warms up."""
    work()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _training(resolved: Resolved) -> Callable[[], object]:
    """The gradients of a random drafter of the recipe's shape over random states."""
    target, options = resolved.target, resolved.recipe.train
    device, dtype = resolved.device, product_dtype(resolved.device, resolved.dtype)
    width, layers = target.hidden, len(resolved.aux_layers)
    vocab = min(options.draft_vocab, target.vocab)
    drafter = build(warm.contract(resolved, TRAIN_ROW_TOKENS)).to(device)
    ids = torch.arange(TRAIN_ROW_TOKENS, dtype=torch.int32) % vocab
    rows = [
        RowStates(
            str(i), ids, torch.randn(TRAIN_ROW_TOKENS, layers, width), torch.randn(TRAIN_ROW_TOKENS, width), ids,
            TRAIN_ROW_TOKENS // 2,
        )
        for i in range(TRAIN_ROWS[device])
    ]  # fmt: skip
    batch = pack(rows, device, options.ttt_steps, row_multiple(device, dtype))
    teacher = Teacher(
        torch.randn(vocab, width, device=device).to(dtype),
        torch.ones(width, device=device),
        target.eps,
        torch.arange(target.vocab, device=device),
        torch.randn(target.vocab, width, device=device).to(dtype),
    )
    way = Autograd if drafter.contract.latent else Gradients
    gradients = way(drafter, teacher, dtype, options.ttt_steps, options.ttt_decay, options.loss)
    work = lambda: float(gradients.add(batch, batch.pairs).total)  # noqa: E731
    work()  # a small batch is captured when its shape comes again, and replayed from then on
    return work
