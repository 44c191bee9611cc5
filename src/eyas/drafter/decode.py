"""Speculative decoding, one request at a time: one loop, in which k = 0 is the plain baseline.

    prefill      target reads the prompt and gives x_n; the drafter reads (x_{t+1}, g_t) for all t < n
    each step    draft d_1…d_k; the target reads [x_n, d_1…d_k] at once; accept m of them and one token of its own;
                 both caches forget what was refused; the drafter reads the m + 1 new pairs with their true states

Greedy: a draft is accepted iff it is the target's argmax. Temperature > 0: the draft is the drafter's argmax, so it is
accepted with the target's probability for it, and a refusal samples from the rest; the output follows the target's
distribution exactly (Leviathan et al., arXiv 2211.17192, with a one-point proposal).
"""

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.drafter.network import Drafter
from eyas.drafter.sampling import pick, probabilities


class Pass(NamedTuple):
    logits_TV: Tensor
    aux_TLD: Tensor | None


class DecodingTarget(Protocol):
    """What decoding needs of an engine: a cache that can forget, and a forward pass that gives aux states."""

    stop_ids: tuple[int, ...]

    def new_cache(self, capacity: int) -> Any: ...

    def step(self, ids: list[int], cache: Any, last_only: bool, aux: bool) -> Pass: ...

    def forget(self, cache: Any, tokens: int) -> None: ...


class DraftSession:
    """The drafter beside one request: its key/value cache, one entry per position t."""

    def __init__(self, drafter: Drafter, embedding_VD: Tensor, capacity: int) -> None:
        c = drafter.contract
        self.drafter, self.embedding = drafter, embedding_VD
        weight = drafter.fc.weight
        self.keys_NCE, self.values_NCE = (
            torch.zeros(c.kv_heads, capacity, width, dtype=weight.dtype, device=weight.device)
            for width in (drafter.key_width, c.head_dim)
        )
        self.kept_W = drafter.kept_W
        self.length = 0  # entries with true states
        self.h_1D = torch.empty(0)

    def read(self, tokens: list[int], aux_TLD: Tensor) -> None:
        """Take in the pairs (x_{t+1}, g_t) that have become true; afterwards draft() continues from the last."""
        h = self.drafter.fuse(aux_TLD.to(self.keys_NCE.dtype))
        self.h_1D = self._layer(torch.tensor(tokens, device=h.device), h, self.length)[-1:]
        self.length += len(tokens)

    def draft(self, k: int) -> list[int]:
        """Propose k tokens, each from the one before."""
        out: list[Tensor] = []
        h = self.h_1D
        for i in range(k):
            if i:
                h = self._layer(out[-1], self.drafter.fed_back(h), self.length + i - 1)
            out.append(self.kept_W[self.drafter.logits(h).argmax(-1)])
        return torch.cat(out).tolist()

    def _layer(self, token_T: Tensor, h_TD: Tensor, start: int) -> Tensor:
        embedded = F.embedding(token_T, self.embedding).to(h_TD.dtype)
        x, residual = self.drafter.mix(embedded, h_TD)
        end = start + len(token_T)
        pos = torch.arange(start, end, device=h_TD.device)
        turn = self.drafter.rotation(pos)
        key, value = self.drafter.key_value(x, turn)
        self.keys_NCE[:, start:end] = key.transpose(0, 1)
        self.values_NCE[:, start:end] = value.transpose(0, 1)
        query = self.drafter.query(x, turn).transpose(0, 1)
        mask = None
        if len(token_T) > 1:
            mask = torch.arange(end, device=h_TD.device)[None] <= pos[:, None]
        attended = F.scaled_dot_product_attention(
            query[None],
            self.keys_NCE[None, :, :end],
            self.values_NCE[None, :, :end],
            attn_mask=mask,
            enable_gqa=True,
        )
        return self.drafter.finish(attended[0].transpose(0, 1).flatten(1), residual)


@dataclass
class Decoded:
    """One answer and how it came about. decode_s excludes the prefill and the first token."""

    ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    steps: int = 0  # target passes after the prefill
    accepted_at: list[int] = field(default_factory=list)  # [k], tokens cut by a stop or the limit not counted
    prefill_s: float = 0.0
    decode_s: float = 0.0


@torch.inference_mode()
def decode(
    target: DecodingTarget,
    drafter: Drafter | None,
    embedding_VD: Tensor | None,
    prompt_ids: list[int],
    k: int,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Decoded:
    """Answer one prompt with k drafts a step; k = 0 never touches the drafter.

    Raises ValueError when k > 0 and there is no drafter or embedding.
    """
    if k and (drafter is None or embedding_VD is None):
        raise ValueError("k > 0 needs a drafter and the target's embedding")
    rng = torch.Generator().manual_seed(seed)
    out = Decoded(accepted_at=[0] * k)
    began = time.perf_counter()
    capacity = len(prompt_ids) + max_tokens + k + 1
    cache = target.new_cache(capacity)
    first = target.step(prompt_ids, cache, last_only=True, aux=k > 0)
    token = _sample(first.logits_TV[-1:], temperature, rng)
    session = None
    if k and drafter is not None and embedding_VD is not None:
        session = DraftSession(drafter, embedding_VD, capacity)
        assert first.aux_TLD is not None
        session.read([*prompt_ids[1:], token], first.aux_TLD)
    out.prefill_s = time.perf_counter() - began
    _emit(out, [token], target.stop_ids, max_tokens)
    began = time.perf_counter()
    while out.finish_reason == "":
        drafts = session.draft(k) if session else []
        seen = target.step([out.ids[-1], *drafts], cache, last_only=False, aux=k > 0)
        accepted, own = _verify(seen.logits_TV, drafts, temperature, rng)
        target.forget(cache, k - accepted)
        new = [*drafts[:accepted], own]
        emitted = _emit(out, new, target.stop_ids, max_tokens)
        out.steps += 1
        for i in range(min(accepted, emitted)):
            out.accepted_at[i] += 1
        if session and out.finish_reason == "":
            assert seen.aux_TLD is not None
            session.read(new, seen.aux_TLD[: accepted + 1])
    out.decode_s = time.perf_counter() - began
    return out


def _emit(out: Decoded, new: list[int], stop_ids: tuple[int, ...], max_tokens: int) -> int:
    """Append new tokens up to a stop token or the limit; returns how many, and sets the finish reason."""
    out.finish_reason = ""
    for count, token in enumerate(new, 1):
        out.ids.append(token)
        if token in stop_ids:
            out.finish_reason = "stop"
        elif len(out.ids) == max_tokens:
            out.finish_reason = "length"
        if out.finish_reason:
            return count
    return len(new)


def _verify(
    logits_TV: Tensor, drafts: list[int], temperature: float, rng: torch.Generator
) -> tuple[int, int]:
    """How many drafts the target accepts, and the token of its own that follows them."""
    if temperature == 0:
        best = logits_TV.argmax(-1).tolist()
        accepted = next((i for i, d in enumerate(drafts) if d != best[i]), len(drafts))
        return accepted, best[accepted]
    probs = probabilities(logits_TV, temperature)
    for i, d in enumerate(drafts):
        if float(torch.rand((), generator=rng)) >= float(probs[i, d]):
            rest = probs[i].clone()
            rest[d] = 0
            return i, int(pick(rest[None], torch.rand(1, generator=rng).to(rest.device)))
    return len(drafts), int(pick(probs[-1:], torch.rand(1, generator=rng).to(probs.device)))


def _sample(logits_1V: Tensor, temperature: float, rng: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_1V.argmax(-1))
    return int(pick(probabilities(logits_1V, temperature), torch.rand(1, generator=rng).to(logits_1V.device)))
