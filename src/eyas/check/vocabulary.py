"""The rule of a drafter's vocabulary map: d2t holds offsets (target id = draft id + d2t[draft id]), t2d marks the kept target ids."""

from collections.abc import Iterator

import numpy as np

from eyas.causes import Finding, error, unknown, warning
from eyas.drafter.facts import Facts
from eyas.errors import ContractError

THOUGHTS = ("<think>", "</think>", "<|channel|>", "<|message|>", "◁think▷", "◁/think▷")


def rule(f: Facts) -> Iterator[Finding]:
    """d2t holds offsets: target id = draft id + d2t[draft id]."""
    where, large = f"{f.path}: d2t", f.card["vocab"].value
    small = f.card["draft_vocab"].value
    if "d2t" not in f.names:
        if small and large and small < large:
            fix = (
                f"eyas check {f.path} --fix"
                if "t2d" in f.names
                else "export d2t again, from the training checkpoint"
            )
            yield error(
                "vocabulary",
                f"{f.path} has no d2t, and drafts {small:,} of {large:,} ids: every engine takes draft id i for target id i",
                fix,
            )
        return
    try:
        d2t, t2d = f.small.get("d2t"), f.small.get("t2d")
    except ContractError as e:
        yield error("vocabulary", str(e), "export d2t as int64")
        return
    if d2t is None:
        yield error("vocabulary", f"{where} is no list of numbers", "export d2t again")
        return
    if d2t.dtype != np.int64:
        yield error(
            "vocabulary",
            f"{where} is {f.weights.tensors[f.names['d2t']].dtype}; engines need int64",
            f"eyas check {f.path} --fix",
        )
    if d2t.dtype.kind not in "iu":
        return
    yield from _map(f, d2t.astype(np.int64), None if t2d is None else t2d.astype(bool), where)


def absolute(d2t: np.ndarray, t2d: np.ndarray | None, vocab: int | None) -> bool:
    """Whether a map certainly holds the ids themselves: those that t2d marks, or a rising list whose last sum leaves the vocabulary."""
    kept = np.arange(len(d2t)) + d2t
    if not d2t.any() or np.array_equal(kept, d2t):
        return False
    if t2d is not None:
        return np.array_equal(d2t, np.flatnonzero(t2d))
    inside = vocab is not None and d2t[-1] < vocab <= kept[-1]
    return bool(inside and (np.diff(d2t) > 0).all())


def _map(f: Facts, d2t: np.ndarray, t2d: np.ndarray | None, where: str) -> Iterator[Finding]:
    small, large = f.card["draft_vocab"].value, f.card["vocab"].value
    fix, again = f"eyas check {f.path} --fix", "export d2t again, as offsets"
    if len(d2t) == 0:
        yield error("vocabulary", f"{where} is empty", again)
        return
    kept = np.arange(len(d2t)) + d2t
    if small and len(d2t) != small:
        yield error(
            "vocabulary",
            f"{where} has {len(d2t):,} entries, and the draft vocabulary {small:,}",
            "export them together",
        )
    if t2d is not None and large and len(t2d) != large:
        yield error(
            "vocabulary",
            f"{f.path}: t2d has {len(t2d):,} entries, and the target's vocabulary {large:,}",
            "export them together",
        )
    if absolute(d2t, t2d, large):
        yield error(
            "vocabulary",
            f"{where} holds absolute ids ({d2t[:4].tolist()}, …); engines add arange, and would draft {kept[:4].tolist()}, …",
            fix,
        )
    elif large and (kept.min() < 0 or kept.max() >= large):
        yield error("vocabulary", f"{where} maps to ids outside 0..{large - 1}", again)
    elif not bool((np.diff(kept) > 0).all()):
        yield error(
            "vocabulary", f"{where} is not strictly increasing after adding arange: ids repeat", again
        )
    elif t2d is not None and not np.array_equal(kept, np.flatnonzero(t2d)):
        yield error("vocabulary", f"{where} and t2d keep different ids", again if d2t.any() else fix)
    elif t2d is None and not d2t.any() and small and large and small < large:
        said = f"{where} is all zeros: the first {small:,} ids, or a map that was never filled"
        yield unknown("vocabulary", said, "ask who trained it")
    else:
        yield from _special(f, set(kept.tolist()), where)


def _special(f: Facts, kept: set[int], where: str) -> Iterator[Finding]:
    stops = f.contract.stop_ids if f.contract else f.target.stop_ids if f.target else ()
    lost = [i for i in stops if i not in kept]
    if lost:
        bad = f.contract is not None or len(lost) == len(stops)
        yield Finding(
            "vocabulary", "error" if bad else "warning",
            f"{where}: stop ids {lost} are outside the draft vocabulary; {'ends' if bad else 'such ends'} are never drafted",
            "build the draft vocabulary with them, and train again",
        )  # fmt: skip
    for token, number in (f.target.added_tokens() if f.target else {}).items():
        if token in THOUGHTS and number not in kept:
            yield warning(
                "vocabulary",
                f"{where}: {token} ({number}) is outside the draft vocabulary: the drafter can never propose it",
                "build the draft vocabulary with it",
            )
