"""A drafter on disk, in the dialect that vLLM reads as it is (flat config, `midlayer.*`, d2t offsets, t2d).

    drafter/best/config.json  model.safetensors  contract.json  metrics.json  trained_on.txt

The table below is the whole translation. Source of names: vLLM 0.32 model_executor/models/llama_eagle3.py.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eyas import contract as contracts
from eyas.contract import Contract
from eyas.drafter import dialects, shapes
from eyas.drafter.architectures import build
from eyas.drafter.network import Drafter
from eyas.drafter.shapes import ATTENTION, LATENT, LAYER_NORMS, MLP
from eyas.errors import ContractError
from eyas.stores import tensors as tensor_files

TRAINED_ON = "trained_on.txt"


def names(c: Contract) -> dict[str, str]:
    """Our parameter name -> the tensor's name on disk."""
    table = {"fc": "fc", "norm": "norm", "lm_head": "lm_head"}
    table |= {n: f"midlayer.self_attn.{n}" for n in (LATENT if c.latent else ATTENTION)}
    table |= {n: f"midlayer.mlp.{n}" for n in MLP}
    table |= {n: f"midlayer.{n}" for n in LAYER_NORMS}
    if c.norms.qk:
        table |= {n: f"midlayer.self_attn.{n}" for n in ("q_norm", "k_norm")}
    if c.norms.fc == "chunks":
        table |= {f"fc_norm.{i}": f"fc_norm.{i}" for i in range(len(c.aux_layers))}
    if c.norms.fc == "whole":
        table["input_norm"] = "input_norm"
    return {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in table.items()}


def config(c: Contract) -> dict[str, Any]:
    """The flat config.json, which vLLM and SGLang read with the same meaning where SGLang can run the drafter at all."""
    stop = c.stop_ids[0] if len(c.stop_ids) == 1 else list(c.stop_ids)
    return dialects.config_of(contracts.card(c), "vllm", {"eos_token_id": stop}, c.target_model_type)


def write(
    folder: Path, drafter: Drafter, metrics: dict[str, Any], trained_on: Iterable[str] | None = None
) -> None:
    """Write a drafter folder (not atomic: write into a temporary folder and rename it).

    trained_on: keys of all prompts that it and its parents have learned from; None where that is unknown.
    """
    c = drafter.contract
    folder.mkdir(parents=True)
    ours = drafter.state_dict()
    dtype = getattr(torch, c.dtype)
    tensors = {theirs: ours[name].detach().to("cpu", dtype).contiguous() for name, theirs in names(c).items()}
    if c.draft_vocab < c.vocab:
        kept = drafter.kept_W.cpu()
        tensors["d2t"] = ours["d2t_W"].cpu().clone()
        tensors["t2d"] = torch.zeros(c.vocab, dtype=torch.bool).index_fill_(0, kept, True)
    tensor_files.save(tensors, folder / "model.safetensors", {"format": "pt"})
    c.write(folder / "contract.json")
    (folder / "config.json").write_text(json.dumps(config(c), indent=1) + "\n", encoding="utf-8")
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    if trained_on is not None:
        (folder / TRAINED_ON).write_text("".join(f"{k}\n" for k in sorted(trained_on)), encoding="utf-8")
    for path in folder.iterdir():
        with path.open("rb") as f:
            os.fsync(f.fileno())


def trained_on(folder: Path) -> frozenset[str] | None:
    """Keys of the prompts that a drafter has learned from, or None where its folder does not say."""
    path = folder / TRAINED_ON
    return frozenset(path.read_text(encoding="utf-8").split()) if path.is_file() else None


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """The tensors on disk. Raises ContractError when the file is missing or unreadable."""
    path = folder / "model.safetensors"
    try:
        return load_file(path)
    except (SafetensorError, OSError) as e:
        raise ContractError(f"{path} is not a readable safetensors file ({e}).") from e


def read(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Drafter:
    """Load a drafter that `write` wrote; every tensor must be there with its shape, and no other.

    Raises ContractError naming the first tensor that differs.
    """
    c = contracts.read(folder / "contract.json")
    tensors = tensors_of(folder)
    for problem in misfits(tensors, c):
        raise ContractError(f"{folder}/model.safetensors: {problem}")
    drafter = build(c)
    state = {ours: tensors[theirs] for ours, theirs in names(c).items()}
    drafter.load_state_dict(state | {"d2t_W": tensors.get("d2t", drafter.d2t_W)})
    return drafter.to(device, dtype).eval()


def misfits(tensors: dict[str, Tensor], c: Contract) -> list[str]:
    """How the tensors differ from what the contract needs: missing, unknown, or of another shape."""
    wanted = shapes.of_contract(c)
    out = [f'tensor "{n}" is missing' for n in wanted if n not in tensors]
    out += [
        f'tensor "{n}" is not part of this drafter'
        for n in tensors
        if n not in wanted and n not in ("embed_tokens.weight", "d2t", "t2d")
    ]
    out += [
        f'tensor "{n}" has shape {tuple(tensors[n].shape)}, expected {s}'
        for n, s in wanted.items()
        if n in tensors and tuple(tensors[n].shape) != s
    ]
    return out
