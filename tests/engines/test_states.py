"""States kept by a real vLLM in the pass that generates, and in a pass over stored ids, against the embedded engine's: the real small
target, and a tiny DeepSeek-V3 (MLA and experts). Three starts of a minute."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from eyas import pipeline
from eyas.engines.hf import HFEngine
from eyas.stores import conversations, states
from tests.conftest import byte_tokenizer

TARGET = Path(__file__).parents[2] / "models" / "smollm2-135m"
MLA_LORA, MLA_ROPE = 512, 64  # the only sizes that the CPU kernel takes


def recipe(folder, name, target, layers, args=(), **generate):
    path = folder / f"{name}.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": name,
                "target": {"model": str(target), "dtype": "float32", "aux_layers": layers},
                "engine": {"name": "vllm", "args": list(args)},
                "prompts": {"sources": [{"path": "builtin"}], "limit": 10, "held_out": 0.3},
                "generate": {"max_tokens": 24, "concurrency": 8, **generate},
            }
        )
    )
    return path


def stored(folder):
    shards = json.loads((folder / "states" / "manifest.json").read_text())["content"]
    return {r.row_id: r.load() for r in states.refs(folder / "states", shards)}


def against_embedded(resolved, folder, until):
    """Largest error of a state, relative to its row's size, over all rows that the engine computed; top-1 agreement."""
    engine = HFEngine(resolved.target, "float32", "cpu", resolved.aux_layers)
    worst, same, count = 0.0, 0, 0
    for row in stored(folder).values():
        with torch.inference_mode():
            seen = engine.states([row.ids_T.tolist()])
        end = len(row) + until
        first = row.last_from
        for a, b in ((row.aux_TLD, seen.aux_BTLD[0]), (row.last_SD, seen.last_BTD[0, first:])):
            here = end if a is not row.last_SD else end - first
            a, b = a[:here].float(), b[:here].float()
            worst = max(worst, float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max()))
        here = slice(row.start, len(row) - 1)
        same += int((row.top1_T[here] == seen.top1_BT[0, here]).sum())
        count += len(row) - 1 - row.start
    return worst, same / count


def test_one_pass_on_the_real_target(tmp_path):
    path = recipe(tmp_path, "one", TARGET, [2, 15, 27])
    made = pipeline.run(str(path), (), str(tmp_path / "run"), last="extract")
    checks = made["extract"]["checks"]
    print(json.dumps(checks))
    assert made["extract"]["with"] == "generate" and checks["greedy_agreement"] > 0.99
    for name in ("decoded_against_prefilled", "together_against_alone", "against_embedded"):
        assert min(checks[name]["cosine"].values()) > 0.999
        assert checks[name]["shifts"]["0"] > 0.999 > 0.95 > checks[name]["shifts"]["1"]
    resolved, _, _ = pipeline.open_run(str(path), (), str(tmp_path / "run"))
    worst, same = against_embedded(resolved, tmp_path / "run", until=-1)
    assert worst < 0.02 and same > 0.99


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """Latent attention, a dense layer and two of experts, random weights. The part of the keys that is rotated is zero: vLLM 0.32.0's
    CPU build mixes up the rotated keys of a batch (its own answers then depend on who else is in it)."""
    folder = tmp_path_factory.mktemp("deepseek")
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=260, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
            n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=MLA_LORA, q_lora_rank=48,
            qk_rope_head_dim=MLA_ROPE, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=512, eos_token_id=2,
            bos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape) * (0.9 if "lm_head" in name else 0.15))
            else:
                p.copy_(1 + 0.1 * torch.randn(p.shape))
            if "kv_a_proj_with_mqa" in name:
                p[MLA_LORA:] = 0
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"})
    )
    return folder


def test_one_pass_and_a_pass_on_latent_attention_and_experts(deepseek, tmp_path):
    # a CPU with AMX would take an attention that knows no float32
    path = recipe(tmp_path, "mla", deepseek, [1, 2], args=("--attention-backend", "CPU_MLA"))
    resolved, _, _ = pipeline.open_run(str(path), (), str(tmp_path / "run"))
    made = pipeline.run(str(path), (), str(tmp_path / "run"), last="extract")
    assert made["extract"]["with"] == "generate"
    worst, same = against_embedded(resolved, tmp_path / "run", until=-1)
    print(f"one pass: worst error {worst:.4f}, same top-1 {same:.3f}")
    assert worst < 0.02 and same == 1.0
    sets = ("extract.with=pass",)
    made = pipeline.run(str(path), sets, str(tmp_path / "run"), first="extract", last="extract")
    assert made["extract"]["with"] == "pass" and made["extract"]["checks"]["greedy_agreement"] > 0.99
    worst, same = against_embedded(resolved, tmp_path / "run", until=0)
    print(f"a pass: worst error {worst:.4f}, same top-1 {same:.3f}")
    assert worst < 0.02 and same == 1.0
    assert sum(1 for _ in conversations.read(tmp_path / "run" / "conversations")) == len(
        stored(tmp_path / "run")
    )
