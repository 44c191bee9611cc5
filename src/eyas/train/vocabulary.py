"""The draft vocabulary: which target ids a drafter can propose.

The most frequent tokens of the supervised answers; stop ids and special ids always; then, if room is left, tokens of the
prompts, then the lowest ids (the commonest pieces of a BPE vocabulary).
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.progress import say
from eyas.recipe import Resolved
from eyas.train.data import Data
from eyas.train.parent import Parent


class Vocabulary(NamedTuple):
    kept_W: Tensor  # target ids, ascending
    coverage: float  # share of supervised tokens inside it
    distinct: int  # distinct supervised tokens
    filled: int  # places taken by ids that no answer had


def choose(
    answers: Iterable[Tensor], prompts: Iterable[Tensor], always: Iterable[int], size: int, vocab: int
) -> Vocabulary:
    """Choose `size` of `vocab` ids (all of them when size >= vocab). answers, prompts: int tensors of token ids."""
    counts = _count(answers, vocab)
    distinct = int((counts > 0).sum())
    size = min(size, vocab)
    rank = counts.double()
    rank += (counts == 0) * _count(prompts, vocab).double() * 1e-9  # prompts only order what no answer had
    rank[[i for i in always if i < vocab]] = float("inf")
    order = torch.sort(rank, descending=True, stable=True).indices  # ties: the lower id first
    kept = order[:size].sort().values
    total = int(counts.sum())
    return Vocabulary(
        kept, float(counts[kept].sum()) / max(total, 1), distinct, int((counts[kept] == 0).sum())
    )


def measure(answers: Iterable[Tensor], kept_W: Tensor, vocab: int) -> Vocabulary:
    """A given map, and what it covers of these answers."""
    counts = _count(answers, vocab)
    inside = counts[kept_W]
    return Vocabulary(
        kept_W,
        float(inside.sum()) / max(int(counts.sum()), 1),
        int((counts > 0).sum()),
        int((inside == 0).sum()),
    )


def _count(rows: Iterable[Tensor], vocab: int) -> Tensor:
    counts = torch.zeros(vocab, dtype=torch.int64)
    for row in rows:
        counts += torch.bincount(row.long(), minlength=vocab)
    return counts


def draft(resolved: Resolved, data: Data, start: Parent | None = None) -> Vocabulary:
    """The parent's where it has as many ids as the recipe asks for, or chosen from the training answers; printed with what it covers."""
    if start and start.contract.draft_vocab == min(resolved.recipe.train.draft_vocab, resolved.target.vocab):
        answers = (r.ids()[r.start :] for r in data.train)
        vocab = measure(answers, start.held.drafter.kept_W, resolved.target.vocab)
        _say(vocab, data, "kept from the parent")
        return vocab
    always = {
        *resolved.target.stop_ids,
        *resolved.target.tokenizer(resolved.recipe.target.trust_remote_code).all_special_ids,
    }
    vocab = choose(
        (r.ids()[r.start :] for r in data.train),
        (r.ids()[: r.start] for r in data.train),
        always,
        resolved.recipe.train.draft_vocab,
        resolved.target.vocab,
    )
    _say(vocab, data)
    return vocab


def _say(vocab: Vocabulary, data: Data, origin: str = "") -> None:
    held = torch.cat([r.ids()[r.start :].long() for r in data.held_out])
    inside = torch.isin(held, vocab.kept_W).float().mean().item()
    if not origin and vocab.filled:
        origin = f"{vocab.filled:,} places filled with ids that no answer had"
    notes = ", ".join(filter(None, [f"{vocab.distinct:,} distinct", origin]))
    say(
        f"  draft vocabulary: {len(vocab.kept_W):,} ids cover {vocab.coverage:.2%} of the supervised tokens ({notes}) "
        f"and {inside:.2%} of the held-out ones"
    )
