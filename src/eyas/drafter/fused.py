"""A drafter's matrices as the products of training read them: in one type, fused, scales folded in; and their gradients, float32.

    fc         [D, L*D]            fc's norms folded in: W' = W * scale
    embedded   [(H+2N)*E, D]       the halves of q, k, v that read the embedding, input_layernorm folded in
    hidden     [(H+2N)*E, D]       the halves that read the hidden state; its rows of q, and of k and v, alone too
    gate_up    [2I, D]
    o, down, head

Gradients are written where the parameters' `.grad` see them, as views, and so need no copy; those of folded matrices become the
parameter's and its scale's at the end of a step: dW = dW' * scale, dscale = sum over rows of dW' * W.
"""

from types import ModuleType

import torch
from torch import Tensor, nn

from eyas.drafter.network import Drafter


class Matrix:
    """A weight [Y, X] in the products' type, and its gradient in float32. parts: matrices of some of its rows, where they are used
    alone too."""

    def __init__(
        self, ops: ModuleType, value_YX: Tensor, grad_YX: Tensor, parts: tuple["Matrix", ...] = ()
    ) -> None:
        self.ops, self.value_YX, self.grad_YX, self.parts = ops, value_YX, grad_YX, parts
        self.empty = True  # no gradient was added yet: the first one is written over what is there

    def __call__(self, x_TX: Tensor, more_TY: Tensor | None = None) -> Tensor:
        """x @ W.T, plus `more`."""
        if more_TY is not None:
            return torch.addmm(more_TY, x_TX, self.value_YX.T)
        return x_TX @ self.value_YX.T

    def back(self, dy_TY: Tensor, more_TX: Tensor | None = None, out_TX: Tensor | None = None) -> Tensor:
        """The gradient of x, plus `more`, written to `out` where that is given."""
        if more_TX is not None:
            return torch.addmm(more_TX, dy_TY, self.value_YX)
        return torch.mm(dy_TY, self.value_YX, out=out_TX)

    def add(self, dy_TY: Tensor, x_TX: Tensor) -> None:
        """Add the gradient of W."""
        for part in self.parts:
            if part.empty != self.parts[0].empty:
                raise ValueError("parts of a matrix have gradients of different batches")
        self.ops.add_product(
            self.grad_YX, dy_TY, x_TX, all(p.empty for p in self.parts) if self.parts else self.empty
        )
        for m in (self, *self.parts):
            m.empty = False


class Fused:
    """The matrices, and the parameters that they are made of. `refresh` after every change of the parameters; `finish` when all
    gradients of a step are added."""

    def __init__(self, drafter: Drafter, dtype: torch.dtype, ops: ModuleType) -> None:
        d, c = drafter, drafter.contract
        self.drafter, self.dtype, self.ops = drafter, dtype, ops
        self.device = d.fc.weight.device
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.qkv = (d.q_proj, d.k_proj, d.v_proj)
        self.rows = (q, kv, kv)
        d_qkv, d_gate_up = self._zeros(q + 2 * kv, 2 * c.hidden), self._zeros(2 * c.mlp, c.hidden)
        for module, grad in zip(self.qkv, d_qkv.split(self.rows), strict=True):
            module.weight.grad = grad
        d.gate_proj.weight.grad, d.up_proj.weight.grad = d_gate_up.chunk(2)
        for p in d.parameters():
            if p.grad is None:
                p.grad = self._zeros(*p.shape)
        self.embedded_q, self.embedded_kv = self._rows(d_qkv[:, : c.hidden], q)
        hidden = self._values(d_qkv[:, c.hidden :])
        self.hidden_q = Matrix(ops, hidden[:q], d_qkv[:q, c.hidden :])
        self.hidden_kv = Matrix(ops, hidden[q:], d_qkv[q:, c.hidden :])
        self.hidden = Matrix(ops, hidden, d_qkv[:, c.hidden :], (self.hidden_q, self.hidden_kv))
        self.gate_up = Matrix(ops, self._values(d_gate_up), d_gate_up)
        self.fc, self.o, self.down, self.head = (
            self._whole(m) for m in (d.fc, d.o_proj, d.down_proj, d.lm_head)
        )
        self.matrices = (
            self.fc, self.embedded_q, self.embedded_kv, self.hidden, self.gate_up, self.o, self.down, self.head
        )  # fmt: skip
        self.refresh()

    @property
    def begun(self) -> bool:
        """Whether a batch's gradients were added."""
        return not self.fc.empty

    @begun.setter
    def begun(self, value: bool) -> None:
        for m in self.matrices:
            for each in (m, *m.parts):
                each.empty = not value

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self.device)

    def _values(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=self.dtype, device=self.device)

    def _whole(self, module: nn.Linear) -> Matrix:
        grad = module.weight.grad
        assert grad is not None
        return Matrix(self.ops, self._values(grad), grad)

    def _rows(self, grad_YX: Tensor, first: int) -> tuple[Matrix, Matrix]:
        value = self._values(grad_YX)
        return Matrix(self.ops, value[:first], grad_YX[:first]), Matrix(
            self.ops, value[first:], grad_YX[first:]
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the parameters, and begin a step: what was added to their gradients is no longer counted."""
        d, width, fold = self.drafter, self.drafter.contract.hidden, self.ops.fold
        scale = d.input_layernorm.weight
        embedded = (self.embedded_q.value_YX, *self.embedded_kv.value_YX.chunk(2))
        for to, hidden, m in zip(embedded, self.hidden.value_YX.split(self.rows), self.qkv, strict=True):
            fold(to, m.weight[:, :width], scale)
            fold(hidden, m.weight[:, width:])
        gate, up = self.gate_up.value_YX.chunk(2)
        o, down, head = (m.value_YX for m in (self.o, self.down, self.head))
        for to, m in (
            (gate, d.gate_proj),
            (up, d.up_proj),
            (o, d.o_proj),
            (down, d.down_proj),
            (head, d.lm_head),
        ):
            fold(to, m.weight)
        norms = d.fc_norms()
        fold(self.fc.value_YX, d.fc.weight, torch.cat([n.weight for n in norms]) if norms else None)
        self.begun = False

    @torch.no_grad()
    def finish(self) -> None:
        """Make the parameters' gradients of the folded matrices'."""
        d, width, unfold = self.drafter, self.drafter.contract.hidden, self.ops.unfold
        into = _grad(d.input_layernorm).zero_()
        for m in self.qkv:
            unfold(_grad(m)[:, :width], m.weight[:, :width], d.input_layernorm.weight, into)
        start = 0
        for norm in d.fc_norms():
            part = slice(start, start := start + len(norm.weight))
            unfold(_grad(d.fc)[:, part], d.fc.weight[:, part], norm.weight, _grad(norm).zero_())


def _grad(module: nn.Module) -> Tensor:
    grad = module.weight.grad
    assert isinstance(grad, Tensor)
    return grad
