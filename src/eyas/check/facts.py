"""What there is to know of a drafter's folder before any rule looks at it: config, tensors, the card, eyas's own contract, the target.

Torch is not imported, no tensor but the few small ones is read, and no file is opened that the folder does not list itself (links, as a
download cache makes them, are followed).
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from eyas import contract as contracts
from eyas.contract import Card, Contract
from eyas.drafter import cards
from eyas.drafter.cards import Reading
from eyas.drafter.dialects import Folder, Shape
from eyas.errors import ContractError
from eyas.stores import weights
from eyas.stores.weights import Weights
from eyas.target import Target


@dataclass(frozen=True)
class Facts:
    """reading: what config and tensors say, in their dialect. contract: what eyas trained, where it did."""

    path: Path
    weights: Weights
    folder: Folder
    reading: Reading
    contract: Contract | None
    target: Target | None

    @property
    def config(self) -> dict[str, Any]:
        return self.folder.config

    @property
    def card(self) -> Card:
        """What the drafter was trained with, as far as it is known."""
        return contracts.card(self.contract) if self.contract else self.reading.card

    @cached_property
    def names(self) -> dict[str, str]:
        """Canonical name -> name on disk."""
        return self.folder.names()

    @cached_property
    def small(self) -> dict[str, np.ndarray]:
        """Values of d2t and t2d, where they are there and can be read."""
        out: dict[str, np.ndarray] = {}
        for name in ("d2t", "t2d"):
            if name in self.names and len(self.weights.tensors[self.names[name]].shape) == 1:
                out[name] = self.weights.values(self.names[name])
        return out


def gather(path: Path, target: Target | None) -> Facts:
    """Read a drafter's folder. Raises ContractError where it cannot be read at all."""
    config = weights.read_json(path / "config.json")
    held = weights.opened(path)
    if not held.tensors:
        raise ContractError(_nothing(path, held))
    folder = Folder(config, {n: Shape(t.dtype, t.shape) for n, t in held.tensors.items()}, target)
    own = contracts.read(path / "contract.json") if (path / "contract.json").is_file() else None
    return Facts(path, held, folder, cards.read(folder), own, target)


def _nothing(path: Path, held: Weights) -> str:
    if held.problems:
        return "; ".join(held.problems[:5])
    if held.pickles:
        return (
            f"{path} holds its weights as a pickle ({', '.join(held.pickles[:3])}), which can run code when it is read: eyas opens none. "
            "Convert it to safetensors where you trust it."
        )
    return f"{path} holds no *.safetensors"
