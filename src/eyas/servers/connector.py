"""States of stored ids through vLLM's own connector (extract_hidden_states), where eyas's plugin was not tried with its version.

For every prompt the server writes DIR/REQUEST.safetensors: hidden_states [T, L, D] (the aux layers in order, the last state last) and
token_ids [T]. A lock beside it, in versions that have one, is held until the file is whole.
"""

import fcntl
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eyas.errors import ContractError, SurroundingsError
from eyas.servers import client
from eyas.servers.client import COMPLETIONS, Client
from eyas.stores.states import RowStates
from eyas.stores.steps import NO_ID

WHOLE_S, POLL_S = 120.0, 0.05
Wanted = tuple[str, torch.Tensor, int]  # a row's name, its ids [T], the index of the first completion token


def read(
    url: str, model: str, folder: Path, rows: list[Wanted], dtype: torch.dtype, concurrency: int = 16
) -> list[RowStates]:
    """The rows with their states, aux ones as dtype; top1 is known at the last position alone, by the server's answer.

    Raises RequestError where the server refuses one, SurroundingsError where a file does not come, ContractError where it holds
    other ids.
    """
    bodies = [
        {"model": model, "prompt": ids_T.tolist(), "max_tokens": 1, "temperature": 0.0, "return_token_ids": True}
        for _, ids_T, _ in rows
    ]  # fmt: skip

    async def work() -> list[dict[str, Any]]:
        async with Client(url) as asking:
            return await client.gather(asking.ask, COMPLETIONS, bodies, concurrency)

    pairs = zip(client.run(work()), rows, strict=True)
    return [_row(folder / _name(answer), row, _first(answer, url), dtype) for answer, row in pairs]


def _first(answer: dict[str, Any], url: str) -> int:
    ids = client.read_whole(answer, url).ids
    return ids[0] if ids else NO_ID


def _name(answer: dict[str, Any]) -> str:
    said = answer.get("kv_transfer_params")
    path = said.get("hidden_states_path") if isinstance(said, dict) else None
    if not isinstance(path, str):
        raise SurroundingsError(
            "the server named no file of hidden states (kv_transfer_params.hidden_states_path): its version may know no "
            "extract_hidden_states. Set extract.with to auto with another vLLM, or engine.name to hf."
        )
    return Path(path).name  # in our folder, whatever the server says


def _row(path: Path, wanted: Wanted, top1: int, dtype: torch.dtype) -> RowStates:
    name, sent_T, start = wanted
    found = _whole(path)
    ids_T, states_TLD = found["token_ids"].long(), found["hidden_states"]
    if ids_T.tolist() != sent_T.tolist() or len(states_TLD) != len(ids_T):
        raise ContractError(
            f"{path}: row {name} was sent as {len(sent_T)} ids, and states of {len(states_TLD)} positions with "
            f"{len(ids_T)} ids came, which are not the same. Training on them would be silently wrong."
        )
    for done in (path, _lock(path)):
        done.unlink(missing_ok=True)
    aux_TLD = states_TLD[:, :-1].to(dtype).contiguous()
    top1_T = torch.full_like(sent_T, NO_ID)
    top1_T[-1] = top1
    return RowStates(name, sent_T, aux_TLD, states_TLD[:, -1].contiguous(), top1_T, start)


def _lock(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _whole(path: Path) -> dict[str, torch.Tensor]:
    """The file, once it is complete. Raises SurroundingsError where it does not come."""
    deadline, why = time.monotonic() + WHOLE_S, "it did not come"
    while time.monotonic() < deadline:
        try:
            if _lock(path).exists():
                with _lock(path).open() as f:
                    fcntl.flock(f, fcntl.LOCK_SH)
            return load_file(path)
        except (FileNotFoundError, SafetensorError) as e:
            why = str(e) or why
            time.sleep(POLL_S)
    raise SurroundingsError(
        f"{path}: the server's hidden states of a prompt were not there after {WHOLE_S:.0f} s ({why}). Look at the server's log, and "
        "whether the disk is full."
    )
