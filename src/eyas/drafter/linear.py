"""Products of a weight with few rows, on a CPU in float32: what decoding one request is made of.

x @ W.T of 2 to 4 rows takes MKL two to three times as long as one row, though it reads the same weights; W @ x.T, the same
sums, takes as long as one (docs/results/few-rows.json). So verifying k drafts costs little more than a plain step, and the
plain step gains too.
"""

import torch
from torch import Tensor, nn

MOST_ROWS = 64
SLOW_ROWS = (1, 3)  # one more row makes these faster
PAIRED_NUMEL = 300_000  # for one row, only where the weight is this large


class Linear(nn.Linear):
    """nn.Linear with its operands swapped (no gradients, CPU) where that is faster; same result."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or x.device.type != "cpu" or torch.is_grad_enabled():
            return super().forward(x)
        rows = x.numel() // self.in_features
        if rows > MOST_ROWS or (rows == 1 and self.weight.numel() < PAIRED_NUMEL):
            return super().forward(x)
        flat = x.reshape(rows, self.in_features)
        columns = (torch.cat([flat, flat[-1:]]) if rows in SLOW_ROWS else flat).t()
        out = (self.weight @ columns)[:, :rows].t().contiguous().view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def swap(model: nn.Module) -> None:
    """Make every plain nn.Linear of a model one of these; the weights stay where they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
