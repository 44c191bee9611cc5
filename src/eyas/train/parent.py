"""The drafter that training starts from, instead of random weights (`train.init_from`).

Its contract and vocabulary map are kept. Held-out prompts that it was trained on are left out, since acceptance on them
would flatter it.
"""

from pathlib import Path
from typing import NamedTuple

from eyas.drafter import disk
from eyas.drafter.network import Drafter
from eyas.errors import ContractError
from eyas.progress import say
from eyas.recipe import Resolved, find_drafter


class Parent(NamedTuple):
    folder: Path
    drafter: Drafter  # float32, on the CPU
    trained_on: frozenset[str] | None  # keys of its prompts; None where its folder does not say


def read(resolved: Resolved) -> Parent | None:
    """The recipe's parent, or None. Raises ContractError where its weights cannot be read or do not fit its contract."""
    word = resolved.recipe.train.init_from
    if word is None:
        return None
    folder = find_drafter(word)
    made = Parent(folder, disk.read(folder), disk.trained_on(folder))
    c, target = made.drafter.contract, resolved.target
    say(
        f"  starting from {word} ({c.draft_vocab:,} draft ids, trained up to {c.trained_length:,} tokens a row)"
    )
    if c.target_fingerprint != target.fingerprint:
        say(
            f"  note: it was raised for {c.target_identity} ({c.target_fingerprint}), and this target is {target.identity} "
            f"({target.fingerprint})"
        )
    if made.trained_on is None:
        say(
            f"  note: {folder} does not say what it was trained on ({disk.TRAINED_ON}): it may know held-out prompts, "
            "and its acceptance on them would flatter it"
        )
    return made


def refuse_nothing_left(left_out: list[str], kept: int) -> None:
    """Raises ContractError where the parent was trained on every held-out prompt."""
    if left_out and not kept:
        raise ContractError(
            f"train: the drafter to start from was trained on all {len(left_out)} held-out prompts ({', '.join(left_out[:5])}, "
            "…), so nothing can be measured. Give prompts that it has not seen, or a larger prompts.held_out."
        )
