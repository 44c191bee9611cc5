"""Drafter folders as other trainers write them: a target of 10 layers and width 64, aux layers (ours) [2, 4, 7], 128 of 512 ids.

Configs after speculators 0.9.0, SpecForge 0.2.0, SafeAILab EAGLE and ModelOpt 0.47.0.
"""

import copy
import json

import torch
from safetensors.torch import save_file

from eyas.target import Target

H, V, W, LAYERS = 64, 512, 128, 10
KEPT = torch.cat([torch.arange(8), torch.arange(100, 220)])
LAYER = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-05, "vocab_size": 512,
    "attention_bias": False,
}  # fmt: skip
FLAT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    **LAYER,
    "draft_vocab_size": 128,
    "tie_word_embeddings": False,
}
IDS = "eagle_aux_hidden_state_layer_ids"
CONFIGS = {
    "vllm": {**FLAT, "rope_theta": 10000.0, IDS: [2, 4, 7], "num_aux_hidden_states": 3, "norm_before_residual": False},
    "sglang": {**FLAT, "rope_theta": 10000.0, "eagle_config": {"use_aux_hidden_state": True, IDS: [1, 3, 6]}},
    "speculators": {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": 128, "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "target_hidden_size": None, IDS: [2, 4, 7], "tie_word_embeddings": False, "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}], "verifier": {"name_or_path": "x"},
        },
        "transformer_layer_config": {"model_type": "llama", **LAYER, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "eagle": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16", "draft_vocab_size": 128,
        **{k: v for k, v in LAYER.items() if k not in ("head_dim", "attention_bias")},
    },
    "modelopt": {
        **FLAT, "torch_dtype": "bfloat16", "rope_scaling": {"rope_type": "default", "rope_theta": 10000}, "rope_theta": 10000,
        "eagle_config": {IDS: [1, 3, 6], "use_aux_hidden_state": True, "next_layer_regular": True, "parallel_draft_step": 1},
    },
}  # fmt: skip
MLA = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-05, "vocab_size": 512,
    "draft_vocab_size": 128, "torch_dtype": "bfloat16", "rope_theta": 50000.0, "max_position_embeddings": 512,
    "eagle_config": {IDS: [1, 3, 6], "use_aux_hidden_state": True},
}  # fmt: skip


def tensors(layer="midlayer", latent=False, mapped=True, marked=True):
    g = torch.Generator().manual_seed(0)
    attention = {"q_proj": (64, 128), "k_proj": (32, 128), "v_proj": (32, 128), "o_proj": (64, 64)}
    if latent:
        attention = {
            "q_a_proj": (32, 128), "q_a_layernorm": (32,), "q_b_proj": (96, 32), "kv_a_proj_with_mqa": (24, 128),
            "kv_a_layernorm": (16,), "kv_b_proj": (128, 16), "o_proj": (64, 64),
        }  # fmt: skip
    shapes = {f"{layer}.self_attn.{n}": s for n, s in attention.items()}
    shapes |= {
        f"{layer}.mlp.{n}": s
        for n, s in (("gate_proj", (128, 64)), ("up_proj", (128, 64)), ("down_proj", (64, 128)))
    }
    shapes |= {f"{layer}.{n}": (64,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    shapes |= {"fc": (64, 192), "norm": (64,), "lm_head": (128, 64)}
    out = {f"{n}.weight": torch.randn(s, generator=g).bfloat16() for n, s in shapes.items()}
    if mapped:
        out["d2t"] = KEPT - torch.arange(W)
    if marked:
        out["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, KEPT, True)
    return out


def write(folder, config, made):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in made.items()}, folder / "model.safetensors")
    return folder


def foreign(folder, dialect, change=None, change_tensors=None):
    """A healthy folder of a dialect; change(config) and change_tensors(tensors) break it."""
    config = copy.deepcopy(MLA if dialect == "mla" else CONFIGS[dialect])
    made = tensors(
        "layers.0" if dialect in ("speculators", "modelopt", "mla") else "midlayer",
        dialect == "mla",
        marked=dialect != "modelopt",
    )
    if dialect == "speculators":
        made["embed_tokens.weight"] = torch.randn(V, H).bfloat16()
    if change:
        change(config)
    if change_tensors:
        change_tensors(made)
    return write(folder, config, made)


def target(folder, model_type="llama", layers=LAYERS, **config):
    """Facts of the target, without weights."""
    return Target(
        folder=folder, config=config, model_type=model_type, hidden=H, layers=layers, heads=4, kv_heads=2, head_dim=16, mlp=128,
        vocab=V, eps=1e-5, rope_theta=10000.0, context=512, stop_ids=(2,), identity="x", files={},
    )  # fmt: skip
