"""The drafter that training starts from, instead of random weights (`train.init_from`): anybody's, opened as our network.

Its contract and vocabulary map are kept, unless the recipe names another. Before the first step it must show what it can: the weights
are replayed under every reading (drafter/probe.py), unless eyas itself trained them for this target, and the drafter that training
would start with must accept as much as the parent did. Held-out prompts that the parent was trained on are left out, since acceptance
on them would flatter it.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas import warm
from eyas.contract import Contract
from eyas.drafter import disk, opening, probe, replay
from eyas.drafter.architectures import build
from eyas.drafter.facts import Facts
from eyas.drafter.network import Drafter
from eyas.drafter.opening import Held
from eyas.drafter.probe import Found, Rows
from eyas.engines import reading
from eyas.engines.hf import HFEngine
from eyas.engines.reading import Said
from eyas.errors import ContractError
from eyas.progress import say
from eyas.recipe import Resolved
from eyas.rundir import RunDir
from eyas.stores.states import RowRef, RowStates
from eyas.train import evaluation, records

PROBED = 48  # conversations
LOST = 0.02  # tau, which rounding does not lose
KEPT = 0.5  # of what it accepted, at least, where the recipe changes its conventions or its vocabulary


class Parent(NamedTuple):
    word: str  # as the recipe names it
    facts: Facts
    held: Held
    trained_on: frozenset[str] | None  # keys of its prompts; None where its folder does not say

    @property
    def contract(self) -> Contract:
        return self.held.drafter.contract


def read(resolved: Resolved) -> Parent | None:
    """The recipe's parent, or None. Raises ContractError where its weights cannot be read or do not fit what it states."""
    word = resolved.recipe.train.init_from
    if word is None:
        return None
    target = resolved.target
    f = warm.facts_of(word, target)
    held = opening.read(f, target, warm.given(resolved))
    made = Parent(word, f, held, disk.trained_on(f.config_file.parent))
    c = held.drafter.contract
    length = f"trained up to {c.trained_length:,} tokens a row" if c.trained_length else "of unknown training"
    say(f"  starting from {word} ({f.reading.dialect}; {c.draft_vocab:,} draft ids, {length})")
    if f.contract and c.target_fingerprint != target.fingerprint:
        say(
            f"  note: it was raised for {c.target_identity} ({c.target_fingerprint}), and this target is {target.identity} "
            f"({target.fingerprint})"
        )
    if made.trained_on is None:
        say(
            f"  note: {word} does not say what it was trained on ({disk.TRAINED_ON}): it may know held-out prompts, "
            "and its acceptance on them would flatter it"
        )
    if held.own_embedding:
        raise ContractError(
            f"train.init_from: {word} has an embedding of its own, which is not the target's. eyas trains drafters that share the "
            "target's embedding: start from another one, or from nothing."
        )
    return made


def refuse_nothing_left(left_out: list[str], kept: int) -> None:
    """Raises ContractError where the parent was trained on every held-out prompt."""
    if left_out and not kept:
        raise ContractError(
            f"train: the drafter to start from was trained on all {len(left_out)} held-out prompts ({', '.join(left_out[:5])}, "
            "…), so nothing can be measured. Give prompts that it has not seen, or a larger prompts.held_out."
        )


def child(start: Parent, c: Contract, kept_W: Tensor, head_WD: Tensor) -> tuple[Drafter, int]:
    """The drafter that training starts with, and how many rows of its head are the parent's: all weights, and the head row by row by the
    token that it stands for. Rows of tokens that the parent could not draft start as the target's, head_WD."""
    made, parent = build(c), start.held.drafter
    own, theirs = made.state_dict(), parent.state_dict()
    draft_id_V = torch.full((c.vocab,), -1)
    draft_id_V[parent.kept_W] = torch.arange(len(parent.kept_W))
    from_W = draft_id_V[kept_W]
    head = torch.where((from_W >= 0)[:, None], theirs["lm_head.weight"][from_W.clamp_min(0)], head_WD.float())
    own |= {name: t for name, t in theirs.items() if name in own and name not in ("lm_head.weight", "d2t_W")}
    own |= {"lm_head.weight": head, "d2t_W": kept_W - torch.arange(len(kept_W))}
    made.load_state_dict(own)
    return made, int((from_W >= 0).sum())


# ---- what it can, before the first step ----


def examine(
    start: Parent,
    resolved: Resolved,
    held_out: Sequence[RowRef | RowStates],
    train: Sequence[RowRef | RowStates],
) -> dict[str, Any] | None:
    """Probe a parent that eyas did not train for this target; returns what was found, or None where there is nothing to probe. Training
    rows tell as well as held-out ones under which conventions weights work, and few conversations decide little.

    Raises ContractError, naming each convention under which its weights were not trained.
    """
    if start.facts.contract and start.contract.target_fingerprint == resolved.target.fingerprint:
        return None
    rows = [r.load() for side in (_some(held_out, PROBED), _some(train, PROBED)) for r in side][:PROBED]
    found = probe.run(start.held, _with_neighbours(start, resolved, rows), resolved.target, resolved.device)
    start.held.drafter.to("cpu")  # where the drafter that training starts with is made from it
    wrong = [probe.sentence(a) for a in found.axes if a.state == "differs"]
    open_ = [a.name for a in found.axes if a.state in ("undetermined", "not probed")]
    if wrong:
        raise ContractError(
            f"train.init_from: {start.word}: {'; '.join(wrong)}. Its config does not say what its weights were trained for: mend it "
            f"(eyas check {start.facts.config_file.parent} --target {resolved.target.folder} --probe), then type the same command again."
        )
    said = f"; not decided: {', '.join(open_)}" if open_ else ""
    say(
        f"  its conventions, by {found.pairs:,} positions of {found.conversations} conversations: as it states them{said}"
    )
    return _as_json(found)


def _some(rows: Sequence[RowRef | RowStates], count: int) -> Sequence[RowRef | RowStates]:
    """At most so many, from the whole length."""
    return rows[:: max(1, len(rows) // count)][:count]


def _as_json(found: Found) -> dict[str, Any]:
    return {a.name: a.state for a in found.axes}


def _with_neighbours(start: Parent, resolved: Resolved, rows: list[RowStates]) -> Rows:
    """The rows with the states of neighbouring layers too, where the embedded engine can hold the target."""
    stored = Rows(rows, tuple(resolved.aux_layers))
    if why := reading.too_large(resolved.target, resolved.dtype, resolved.device):
        say(f"  its layers are not probed: {why}")
        return stored
    wanted = probe.candidates(start.contract.aux_layers, resolved.target)
    engine = HFEngine(
        resolved.target, resolved.dtype, resolved.device, wanted, resolved.recipe.target.trust_remote_code
    )
    said = [Said(r.row_id, r.ids_T.tolist(), r.start) for r in rows]
    return Rows(reading.states_of(engine, said), wanted)


def compare(
    start: Parent, resolved: Resolved, held_out: Sequence[RowRef | RowStates], metrics: dict[str, Any], changed: list[str]
) -> dict[str, Any] | None:  # fmt: skip
    """The parent as it came against the drafter that training starts with, on the same answers. changed: what the recipe made of it.

    Raises ContractError where its skill was lost on the way. None where the parent cannot be replayed on these states.
    """
    if tuple(resolved.aux_layers) != start.contract.aux_layers:
        say("  the parent itself is not replayed: these states are of other layers than it takes")
        return None
    k = metrics["select_k"]
    drafter = start.held.drafter.to(resolved.device)
    accepted = replay.accepted_lengths(
        drafter, start.held.embedding_VD.to(resolved.device), (r.load() for r in held_out), k
    )
    start.held.drafter.to("cpu")
    walks = [replay.walk(a, k) for a in accepted]
    own, now = replay.tau(walks), metrics["tau"][str(k)]["value"]
    apart = evaluation.gain([[w.steps, sum(w.accepted_at)] for w in walks], metrics["walks"])
    how = f" ({', '.join(changed)})" if changed else ""
    say(
        f"  the parent as it came: held-out tau {own:.3f} at k={k}; what training starts with: {now:.3f}{how}"
    )
    lost = own - now
    if not changed and lost > LOST and apart.high < 0:
        raise ContractError(
            f"train.init_from: {start.word} accepts {own:.3f} tokens a step as it came and {now:.3f} as training would start with it: its "
            "skill was lost in the conversion. This is a fault of eyas: please report it with the folder's config.json."
        )
    if changed and apart.high < 0 and now - 1 < KEPT * (own - 1):
        raise ContractError(
            f"train.init_from: {start.word} accepts {own:.3f} tokens a step as it came and {now:.3f} with {', '.join(changed)}: less than "
            f"{KEPT:.0%} of its skill is left. Leave these keys out, or start from nothing (train.init_from: null)."
        )
    return {"tau": own, "changed": changed}


def changes(start: Parent, c: Contract, mapped: tuple[int, int] | None) -> list[str]:
    """What the recipe changed of the parent, key by key. mapped: of a head that was mapped anew, the rows that are the parent's, and all."""
    old = start.contract
    pairs = {
        "target.aux_layers": (list(old.aux_layers), list(c.aux_layers)),
        "train.norms.before_residual": (old.norms.before_residual, c.norms.before_residual),
        "train.norms.fc": (old.norms.fc, c.norms.fc),
        "train.norms.output": (old.norms.output, c.norms.output),
        "train.norms.qk": (old.norms.qk, c.norms.qk),
    }
    out = [f"{key} {new} for {was}" for key, (was, new) in pairs.items() if was != new]
    if mapped:
        kept, rows = mapped
        out.append(f"head mapped anew, {kept:,} of {rows:,} rows the parent's")
    return out


def gained(rundir: RunDir) -> dict[str, Any]:
    """What training added to the drafter that it started from, on the same held-out answers."""
    by_epoch = {e["epoch"]: e for e in records.evals(rundir / "train" / "evals.jsonl")}
    best = json.loads((rundir / "drafter" / "best" / "metrics.json").read_text(encoding="utf-8"))["epoch"]
    k = by_epoch[0]["select_k"]
    before, after = by_epoch[0]["tau"][str(k)]["value"], by_epoch[best]["tau"][str(k)]["value"]
    added = evaluation.gain(by_epoch[0]["walks"], by_epoch[best]["walks"])
    if best == 0:
        say(
            f"  training added nothing: no epoch is above the {before:.3f} (k={k}) that it started from, which is kept"
        )
    else:
        sure = "" if added.low > 0 else "; the interval holds 0, so it may be chance"
        say(
            f"  training changed held-out tau at k={k} from {before:.3f} to {after:.3f} (epoch {best}): {added.value:+.3f} "
            f"[{added.low:+.3f}, {added.high:+.3f}]{sure}"
        )
    return {"k": k, "tau": before, "best_epoch": best, "gain": added._asdict()}
