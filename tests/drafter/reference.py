"""The drafter written out one position at a time, in float32, from the definition alone. Slow on purpose; shares no code
with eyas.drafter."""

import math

import torch


def rms(x, w, eps):
    return x / torch.sqrt((x * x).mean() + eps) * w


def rotate(x, pos, theta):
    """x: [heads, width]; pairs (i, i + width/2) turn by pos * theta^(-2i/width)."""
    half = x.shape[1] // 2
    out = x.clone()
    for i in range(half):
        a = pos * theta ** (-2 * i / x.shape[1])
        out[:, i] = x[:, i] * math.cos(a) - x[:, i + half] * math.sin(a)
        out[:, i + half] = x[:, i + half] * math.cos(a) + x[:, i] * math.sin(a)
    return out


class Reference:
    """One row. `run(steps, choose)` returns {(t, k): (h, logits)} for every supervised pair."""

    def __init__(self, drafter, embedding, row):
        self.w = dict(drafter.named_parameters())
        self.c, self.row, self.embedding = drafter.contract, row, embedding

    def weight(self, name):
        return self.w[f"{name}.weight"].detach()

    def fuse(self, g):
        c = self.c
        chunks = [g[i] for i in range(len(c.aux_layers))]
        if c.norms.fc == "chunks":
            chunks = [rms(x, self.weight(f"fc_norm.{i}"), c.eps) for i, x in enumerate(chunks)]
        x = torch.cat(chunks)
        if c.norms.fc == "whole":
            x = rms(x, self.weight("input_norm"), c.eps)
        return self.weight("fc") @ x

    def inputs(self, token, h):
        e = rms(self.embedding[token], self.weight("input_layernorm"), self.c.eps)
        n = rms(h, self.weight("hidden_norm"), self.c.eps)
        return torch.cat([e, n]), (n if self.c.norms.before_residual else h)

    def project(self, name, x, pos=None):
        y = (self.weight(name) @ x).view(-1, self.c.head_dim)
        if self.c.norms.qk and name in ("q_proj", "k_proj"):
            w = self.weight(name.replace("proj", "norm"))
            y = torch.stack([rms(head, w, self.c.eps) for head in y])
        return y if pos is None else rotate(y, pos, self.c.rope_theta)

    def layer(self, x, residual, pos, keys, values):
        q = self.project("q_proj", x, pos)
        heads = []
        for head in range(self.c.heads):
            kv = head // (self.c.heads // self.c.kv_heads)
            scores = torch.stack([q[head] @ k[kv] / math.sqrt(self.c.head_dim) for k in keys])
            share = torch.exp(scores - scores.max())
            share = share / share.sum()
            heads.append(sum(p * v[kv] for p, v in zip(share, values, strict=True)))
        h = residual + self.weight("o_proj") @ torch.cat(heads)
        y = rms(h, self.weight("post_attention_layernorm"), self.c.eps)
        gate = self.weight("gate_proj") @ y
        return h + self.weight("down_proj") @ (gate / (1 + torch.exp(-gate)) * (self.weight("up_proj") @ y))

    def run(self, steps, choose=None):
        ids, s, e = self.row.ids_T.tolist(), self.row.start, len(self.row)
        keys, values, first = [], [], []
        for t in range(e - 2):
            x, residual = self.inputs(ids[t + 1], self.fuse(self.row.aux_TLD[t]))
            keys.append(self.project("k_proj", x, t))
            values.append(self.project("v_proj", x))
            first.append((x, residual))
        out = {}
        for t in range(s - 1, e - 2):
            own_k, own_v = [], []
            h = token = None
            for k in range(steps):
                if t + 2 + k > e - 1:
                    break
                if k == 0:
                    x, residual = first[t]
                else:
                    fed = rms(h, self.weight("norm"), self.c.eps) if self.c.norms.output else h
                    x, residual = self.inputs(ids[t + 1 + k] if choose is None else token, fed)
                    own_k.append(self.project("k_proj", x, t + k))
                    own_v.append(self.project("v_proj", x))
                h = self.layer(x, residual, t + k, keys[: t + 1] + own_k, values[: t + 1] + own_v)
                logits = self.weight("lm_head") @ rms(h, self.weight("norm"), self.c.eps)
                token = choose(logits) if choose else None
                out[t, k] = (h, logits, token)
        return out
