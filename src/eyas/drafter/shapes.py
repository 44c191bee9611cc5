"""Names and shapes of an EAGLE-3 drafter's tensors, by canonical names (drafter/dialects.py), without torch."""

from collections.abc import Mapping
from typing import Any

from eyas.contract import Card, Contract, card

MOST_LAYERS, MOST_STATES = 16, 16  # of a drafter that anybody trains: bounds what a config can ask for
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = (
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "o_proj",
)
MLP = ("gate_proj", "up_proj", "down_proj")
LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def parameters(kind: str, depth: int, flags: Mapping[str, bool], chunks: int) -> list[str]:
    """Canonical names of an EAGLE-3 module's weights but for embedding and head. flags: input_norm, fc_norm, qk_norm, bias."""
    out = ["fc.weight", "norm.weight"]
    for i in range(min(depth, MOST_LAYERS)):
        layer = "midlayer" if i == 0 else f"layers.{i}"
        attention = LATENT if kind == "mla" else ATTENTION
        out += [f"{layer}.self_attn.{n}.weight" for n in attention] + [f"{layer}.mlp.{n}.weight" for n in MLP]
        out += [f"{layer}.{n}.weight" for n in LAYER_NORMS if i == 0 or n != "hidden_norm"]
        if flags.get("qk_norm"):
            out += [f"{layer}.self_attn.{n}.weight" for n in ("q_norm", "k_norm")]
        if flags.get("bias"):
            out += [f"{layer}.self_attn.{n}.bias" for n in ATTENTION]
    if flags.get("input_norm"):
        out.append("input_norm.weight")
    if flags.get("fc_norm"):
        out += [f"fc_norm.{i}.weight" for i in range(min(chunks, MOST_STATES))]
    return out


def of_contract(c: Contract) -> dict[str, tuple[int, ...]]:
    """Every tensor of a drafter that eyas trained, with its shape."""
    known = card(c)
    flags = {"input_norm": c.norms.fc == "whole", "fc_norm": c.norms.fc == "chunks", "qk_norm": c.norms.qk}
    names = [*parameters(known["architecture"].value, 1, flags, len(c.aux_layers)), "lm_head.weight"]
    shapes = wanted_shapes(known, len(c.aux_layers) * c.hidden)
    reduced = {"d2t": (c.draft_vocab,), "t2d": (c.vocab,)} if c.draft_vocab < c.vocab else {}
    return {name: shapes[name] for name in names} | reduced  # vLLM 0.32 refuses a map of the whole vocabulary


def wanted_shapes(fields: Card, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights by the fields that an engine takes; width: columns of fc. Only what follows from known fields."""
    v = {name: fact.value for name, fact in fields.items()}
    out: dict[str, tuple[Any, ...]] = {"fc.weight": (v["hidden"], width), "norm.weight": (v["hidden"],)}
    out |= {f"midlayer.{n}.weight": (v["hidden"],) for n in LAYER_NORMS}
    out |= {f"midlayer.mlp.{n}.weight": (v["mlp"], v["hidden"]) for n in ("gate_proj", "up_proj")}
    out |= {"midlayer.mlp.down_proj.weight": (v["hidden"], v["mlp"])}
    out |= {
        "lm_head.weight": (v["draft_vocab"], v["hidden"]),
        "embed_tokens.weight": (v["vocab"], v["hidden"]),
    }
    out |= {"input_norm.weight": (width,)} | {
        f"fc_norm.{i}.weight": (v["target_hidden"],) for i in range(MOST_STATES)
    }
    if v["architecture"] == "llama" and all(v[n] for n in ("heads", "kv_heads", "head_dim", "hidden")):
        q, kv, wide = v["heads"] * v["head_dim"], v["kv_heads"] * v["head_dim"], 2 * v["hidden"]
        out |= {
            "midlayer.self_attn.q_proj.weight": (q, wide),
            "midlayer.self_attn.o_proj.weight": (v["hidden"], q),
        }
        out |= {f"midlayer.self_attn.{n}.weight": (kv, wide) for n in ("k_proj", "v_proj")}
        out |= {f"midlayer.self_attn.{n}.weight": (v["head_dim"],) for n in ("q_norm", "k_norm")}
    if v["architecture"] == "mla" and all(v[n] for n in ("latent", "heads", "hidden")):
        q_rank, kv_rank, nope, rope, value = v["latent"]
        latent = {
            "q_a_proj": (q_rank, 2 * v["hidden"]), "q_a_layernorm": (q_rank,), "q_b_proj": (v["heads"] * (nope + rope), q_rank),
            "kv_a_proj_with_mqa": (kv_rank + rope, 2 * v["hidden"]), "kv_a_layernorm": (kv_rank,),
            "kv_b_proj": (v["heads"] * (nope + value), kv_rank), "o_proj": (v["hidden"], v["heads"] * value),
        }  # fmt: skip
        out |= {f"midlayer.self_attn.{n}.weight": shape for n, shape in latent.items()}
    return {name: shape for name, shape in out.items() if None not in shape}
