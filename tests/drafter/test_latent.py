"""Latent attention: against transformers' own, replayed and decoded alike, trained through autograd, written and read."""

import dataclasses
import random

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from eyas.contract import Latent, Norms
from eyas.drafter import disk, replay
from eyas.drafter.architectures import build
from eyas.drafter.attention import ttt_attention, visible
from eyas.drafter.autograd import Autograd
from eyas.drafter.batch import pack
from eyas.drafter.decode import DraftSession
from eyas.drafter.latent import sharpened
from eyas.drafter.loss import Teacher, ttt_loss
from tests.conftest import contract, random_row

YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.7,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
LATENT = {
    "architecture": "eagle3-mla", "latent": Latent(12, 10, 6, 4, 5), "kv_heads": 4, "head_dim": 5, "eps": 1e-6,
    "rope_scaling": YARN, "context": 256,
}  # fmt: skip


def latent(seed=0, **changes):
    c = contract(**LATENT | changes)
    made = build(c)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.4 if p.dim() == 2 else 0.2) + (p.dim() == 1))
        kept = torch.randperm(c.vocab, generator=g)[: c.draft_vocab].sort().values
        made.d2t_W.copy_(kept - torch.arange(len(kept)))
    return made.eval()


@pytest.mark.parametrize("scaled", [True, False])
def test_attention_is_that_of_transformers(scaled):
    """The layer's attention over a row, with DeepSeek-V3's module holding the same weights."""
    made = latent(rope_scaling=YARN if scaled else None)
    c, a = made.contract, made.contract.latent
    rope = (YARN if scaled else {"rope_type": "default"}) | {"rope_theta": c.rope_theta}
    config = DeepseekV3Config(
        hidden_size=2 * c.hidden, num_attention_heads=c.heads, num_key_value_heads=c.heads, q_lora_rank=a.q_rank, kv_lora_rank=a.kv_rank, rms_norm_eps=c.eps,
        qk_nope_head_dim=a.nope, qk_rope_head_dim=a.rope, v_head_dim=a.value, rope_parameters=rope, max_position_embeddings=256,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = DeepseekV3Attention(config, 0).eval()
    names = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    theirs.load_state_dict({f"{n}.weight": getattr(made, n).weight for n in names}, strict=False)
    theirs.o_proj = torch.nn.Identity()
    tokens = 9
    x = torch.randn(tokens, 2 * c.hidden, generator=torch.Generator().manual_seed(1))
    pos = torch.arange(tokens) + 40  # beyond the original length of the scaled rope
    around = DeepseekV3RotaryEmbedding(config)(x[None], pos[None])
    mask = torch.full((tokens, tokens), float("-inf")).triu(1)[None, None]
    wanted, _ = theirs(x[None], around, mask)
    turn = made.rotation(pos)
    key, value = made.key_value(x, turn)
    seen = visible(tokens, tokens, torch.tensor([0]))
    got = ttt_attention(made.query(x, turn)[None], key[None], value[None], [], seen)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_another_rope_takes_another_scale_with_it():
    """As a probe changes it: contract and angles."""
    made = latent()
    x = torch.randn(1, 2 * made.contract.hidden)
    made.contract = dataclasses.replace(made.contract, rope_scaling=None)
    made.forget_rope()
    fresh = latent(rope_scaling=None)
    pos = torch.tensor([7])
    assert torch.equal(made.query(x, made.rotation(pos)), fresh.query(x, fresh.rotation(pos)))


def test_only_yarn_with_all_dimensions_sharpens_scores():
    assert sharpened(contract(**LATENT)) == pytest.approx((0.07 * torch.tensor(8.0).log().item() + 1) ** 2)
    assert sharpened(contract(**LATENT | {"rope_scaling": None})) == 1
    assert sharpened(contract(**LATENT | {"rope_scaling": YARN | {"mscale_all_dim": 0}})) == 1


def test_replay_drafts_what_the_cache_of_a_decoding_request_does():
    """Each live position's chain of the replay, against a session that has read the row up to there."""
    made = latent(3)
    c = made.contract
    row = random_row(14, 5, 7, c)
    embedding = torch.randn(c.vocab, c.hidden, generator=torch.Generator().manual_seed(2))
    (accepted,) = replay.accepted_lengths(made, embedding, [row], 3)
    ids = row.ids_T.tolist()
    for m, got in enumerate(accepted):
        at = row.start + m
        session = DraftSession(made, embedding, 32)
        with torch.inference_mode():
            session.read(ids[1 : at + 1], row.aux_TLD[:at])
            drafts = session.draft(3)
        truth = ids[at + 1 : at + 4]
        right = next((i for i, t in enumerate(truth) if t != drafts[i]), len(truth))
        assert got == right


@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_gradients_are_those_of_the_loss_over_all_batches(kind):
    made = latent(4)
    c, chance = made.contract, random.Random(0)
    kept = made.kept_W
    draft_id = torch.full((c.vocab,), -1)
    draft_id[kept] = torch.arange(c.draft_vocab)
    teacher = Teacher(
        torch.randn(c.draft_vocab, c.hidden),
        torch.rand(c.hidden) + 0.5,
        1e-5,
        draft_id,
        torch.randn(c.vocab, c.hidden),
    )
    rows = [random_row(n := chance.randrange(5, 30), chance.randrange(1, n - 2), i, c) for i in range(5)]
    batches = [pack(rows[:3], steps=4), pack(rows[3:], steps=4)]
    pairs = sum(b.pairs for b in batches)
    made.zero_grad()
    losses = [ttt_loss(made, teacher, b, 4, 0.7, kind) for b in batches]
    (sum(x.total for x in losses) / pairs).backward()
    wanted = {n: p.grad.clone() for n, p in made.named_parameters()}
    way = Autograd(made, teacher, torch.float32, 4, 0.7, kind)
    found = [way.add(b, pairs) for b in batches]
    way.finish()
    assert sum(float(x.total) for x in found) == pytest.approx(
        sum(x.total.item() for x in losses) / pairs, rel=1e-5
    )
    for mine, theirs in zip(found, losses, strict=True):
        assert mine.hits_K.tolist() == theirs.hits_K.tolist() and mine.pairs == theirs.pairs
    for name, p in made.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-4, atol=1e-6)
    way.refresh()
    assert not any(p.grad.any() for p in made.parameters())
    low = Autograd(
        made,
        teacher._replace(head_WD=teacher.head_WD.bfloat16(), embedding_VD=teacher.embedding_VD.bfloat16()),
        torch.bfloat16, 4, 0.7, kind,
    )  # fmt: skip
    for b in batches:
        low.add(b, pairs)
    for name, p in made.named_parameters():
        assert p.grad.dtype == torch.float32
        assert float((p.grad - wanted[name]).norm() / wanted[name].norm()) < 0.1, name


def test_written_and_read_again_with_every_width(tmp_path):
    made = latent(5, norms=Norms(True, "chunks", True))
    disk.write(tmp_path / "d", made, {})
    again = disk.read(tmp_path / "d", torch.bfloat16)
    assert again.contract == made.contract
    config = disk.config(made.contract)
    assert (
        config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and config["model_type"] == "deepseek_v2"
    )
    assert [
        config[k]
        for k in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    ] == [12, 10, 6, 4, 5]
    assert config["rope_scaling"]["factor"] == 8.0 and "head_dim" not in config
    for a, b in zip(made.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)


def test_a_contract_without_widths_is_read_as_before(tmp_path):
    contract().write(tmp_path / "contract.json")
    from eyas import contract as contracts

    assert contracts.read(tmp_path / "contract.json") == contract()
    dataclasses.replace(contract(), **LATENT).write(tmp_path / "latent.json")
    assert contracts.read(tmp_path / "latent.json").latent == LATENT["latent"]
