"""The rows that a drafter is trained on and those held out."""

from typing import NamedTuple

import torch

from eyas.drafter.batch import usable
from eyas.errors import ContractError
from eyas.progress import say, size
from eyas.recipe import Resolved
from eyas.rundir import RunDir
from eyas.stores import conversations, states
from eyas.stores.checksums import Checksums
from eyas.stores.states import RowRef, RowStates
from eyas.train import group, parent

RESIDENT_SHARE = 0.5  # of the free GPU memory: states that fit into it are moved there once


class Data(NamedTuple):
    train: list[RowRef] | list[RowStates]
    held_out: list[RowRef] | list[RowStates]
    domains: list[str]  # of each held-out row
    keys: frozenset[str]  # of the training prompts
    left_out: list[str]  # held-out prompts that the parent was trained on
    checksums: Checksums  # of the states, some perhaps not read yet


def load(resolved: Resolved, rundir: RunDir, known: frozenset[str] = frozenset()) -> Data:
    """The rows that can be trained on and those held out, without held-out prompts whose keys are known to the parent.

    Raises ContractError where one side is empty, or a shard is not the one that was written.
    """
    manifest = rundir.manifest("extract")
    rows = {r.row_id: r for r in conversations.read(rundir / "conversations")}
    train, held_out, domains = [], [], []
    keys, left_out = set(), dict[str, None]()
    for row in states.refs(rundir / "states", manifest["content"]):
        said = rows.get(row.row_id)
        if said is None or said.ids != row.ids().tolist():
            raise ContractError(
                f"states row {row.row_id} is not in {rundir / 'conversations'} with these ids. Run extract again."
            )
        if not usable(row):
            continue
        if said.split == "train":
            train.append(row)
            keys.add(said.prompt_key)
        elif said.prompt_key in known:
            left_out[said.prompt_id] = None
        else:
            held_out.append(row)
            domains.append(said.domain)
    if left_out:
        named = ", ".join(list(left_out)[:5]) + (", …" if len(left_out) > 5 else "")
        say(f"  {len(left_out)} held-out prompts are left out, since the parent was trained on them: {named}")
    parent.refuse_nothing_left(list(left_out), len(held_out))
    if not train or not held_out:
        raise ContractError(
            f"{rundir / 'states'}: {len(train)} training and {len(held_out)} held-out rows with an answer of two tokens or "
            "more; both are needed."
        )
    mine = manifest["content"] if group.current().leads else ()  # one of several processes verifies
    checksums = Checksums(rundir / "states", mine, rundir / "train" / "verified.json")
    if not checksums.done:
        say(f"  checksums of {size(checksums.bytes)} of states are verified while training goes on")
    return Data(train, held_out, domains, frozenset(keys), list(left_out), checksums)


def resident(data: Data, device: str) -> Data:
    """The rows with their states on the GPU, where they fit; as they are elsewhere."""
    if device != "cuda":
        return data
    needed = states.bytes_of([*data.train, *data.held_out])
    if needed > RESIDENT_SHARE * torch.cuda.mem_get_info()[0]:
        return data
    say(f"  {needed / 1e9:.1f} GB of states fit into the GPU's memory: read once")
    rows = states.load_all([*data.train, *data.held_out], device)
    return data._replace(train=rows[: len(data.train)], held_out=rows[len(data.train) :])
