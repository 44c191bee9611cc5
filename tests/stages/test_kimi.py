"""A target with all that makes Kimi-K2.5 hard, through the whole life in the embedded engine, with a drafter of either layer."""

import json

import pytest
import torch
import yaml
from click.testing import CliRunner

from eyas import contract, pipeline
from eyas import target as targets
from eyas.cli import eyas
from eyas.drafter import disk
from eyas.errors import RecipeError, UsageError
from eyas.stores import conversations
from tests.kimi import standin


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    return standin(
        tmp_path_factory.mktemp("kimi") / "model", "--layers", "4", "--experts", "4", "--hidden", "64"
    )


def recipe(path, model, prompts, **train):
    body = {
        "name": "kimi",
        "target": {
            "model": str(model),
            "trust_remote_code": True,
            "dtype": "float32",
            "aux_layers": [1, 2, 3],
        },
        "prompts": {"sources": [{"path": str(prompts)}], "held_out": 0.3},
        "generate": {"max_tokens": 12, "concurrency": 6},
        "train": {"draft_vocab": 256, "ttt_steps": 3, "epochs": 1, "tokens_per_step": 512, **train},
        "bench": {"k": [2], "rounds": 1, "limit": 2, "max_tokens": 8},
    }
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    return path


@pytest.mark.parametrize("architecture", ["mla", "llama"])
def test_the_whole_life(kimi, prompt_file, tmp_path, architecture):
    path = recipe(tmp_path / "r.yaml", kimi, prompt_file, architecture=architecture)
    made = pipeline.run(str(path), (), str(tmp_path / "run"))
    assert (
        made["extract"]["checks"]["head_agreement"] == 1
        and made["extract"]["checks"]["greedy_agreement"] == 1
    )
    assert made["check"]["healthy"]
    cell = made["bench"]["cells"][0]
    assert cell["outputs"]["fault"] == 0 and cell["tau"]["value"] == pytest.approx(
        cell["tau_replayed"], rel=0.03
    )
    best = tmp_path / "run" / "drafter" / "best"
    drafter = disk.read(best)
    assert (drafter.contract.latent is not None) == (architecture == "mla")
    assert drafter.contract.head_dim == 128  # a value's, not what config.json calls head_dim
    config = json.loads((best / "config.json").read_text())
    assert config["model_type"] == ("deepseek_v2" if architecture == "mla" else "llama")
    rows = list(conversations.read(tmp_path / "run" / "conversations"))
    tokenizer = targets.load(kimi).tokenizer(True)
    begins = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=False
    )
    assert begins.endswith("<think>") and rows[0].prompt_ids[-1] == tokenizer.convert_tokens_to_ids("<think>")


def test_a_drafter_of_either_layer_starts_another_of_its_own(kimi, prompt_file, tmp_path):
    path = recipe(tmp_path / "r.yaml", kimi, prompt_file, architecture="mla")
    made = pipeline.run(str(path), (), str(tmp_path / "run"), last="check")
    parent = tmp_path / "run" / "drafter" / "best"
    warm = (f"train.init_from={parent}", "train.draft_vocab=256", "train.lr=1e-30")
    plain = recipe(tmp_path / "s.yaml", kimi, prompt_file)
    again = pipeline.run(str(plain), warm, str(tmp_path / "again"), last="check")
    assert again["train"]["parent"]["tau"] == pytest.approx(made["train"]["best"]["tau"]["3"]["value"])
    a, b = disk.read(parent), disk.read(tmp_path / "again" / "drafter" / "best")
    assert b.contract.latent == a.contract.latent
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    with pytest.raises(RecipeError, match=r"architecture.* is llama, and the layer of .* is mla"):
        pipeline.open_run(str(plain), (*warm, "train.architecture=llama"), str(tmp_path / "no"))


def test_the_tokenizer_is_code_that_runs_by_the_recipes_word_alone(kimi, prompt_file, tmp_path):
    path = recipe(tmp_path / "r.yaml", kimi, prompt_file)
    with pytest.raises(UsageError, match=r"tokenization_standin\.py.*target\.trust_remote_code: true"):
        pipeline.run(str(path), ("target.trust_remote_code=false",), str(tmp_path / "run"))
    done = CliRunner().invoke(eyas, ["check", str(kimi), "--target", str(kimi)])
    assert done.exit_code != 0  # a target is no drafter, and nothing of it runs


def test_what_is_read_without_loading_the_model(kimi):
    t = targets.load(kimi)
    tokenizer = t.tokenizer(True)
    ends = {tokenizer.convert_tokens_to_ids(name) for name in ("[EOS]", "<|im_end|>")}
    assert set(t.stop_ids) == ends and t.latent and t.model_type == "kimi_k2"
    assert t.tensor_name("lm_head.weight") == "language_model.lm_head.weight"
    assert t.final_norm_D().shape == (64,) and t.head_VD().shape == t.embedding_VD().shape == (t.vocab, 64)
    assert t.cache_bytes(2) == 4 * (512 + 64) * 2
    c = contract.for_target(t, [1, 2, 3], contract.Norms(False, "chunks", True), 256, 3, 99, "mla")
    assert c.rope.scaling and dict(c.rope.scaling)["factor"] == 64 and c.rope_theta == 50000
    assert contract.for_target(t, [1, 2, 3], c.norms, 256, 3, 99).rope_scaling is None


def test_latent_attention_needs_a_target_that_has_it(recipe_file, tmp_path):
    with pytest.raises(RecipeError, match="no latent attention whose widths"):
        pipeline.open_run(str(recipe_file), ("train.architecture=mla",), str(tmp_path / "run"))


def test_norms_of_queries_and_keys_are_none_of_latent_attention(kimi, prompt_file, tmp_path):
    path = recipe(tmp_path / "r.yaml", kimi, prompt_file, architecture="mla", norms={"qk": True})
    with pytest.raises(RecipeError, match="no norms of queries and keys"):
        pipeline.open_run(str(path), (), str(tmp_path / "run"))


def test_the_real_one_is_planned_from_its_sizes_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made = pipeline.run("kimi-k2.5", (), str(tmp_path / "run"), last="plan")["plan"]
    assert made["state_bytes_per_token"] == 4 * 7168 * 2
    assert made["disk_bytes"]["states"] == pytest.approx(828e9, rel=0.01)
    hours = {name: s / 3600 for name, s in made["seconds"].items() if s}
    assert hours["generate"] == pytest.approx(5.3, abs=0.1) and hours["extract"] == pytest.approx(
        1.27, abs=0.05
    )
    assert made["break_even"] == [{"k": 3, "tau": 1.98, "accepted": pytest.approx(0.327, abs=1e-3)}]
    said = capsys.readouterr()
    assert "1.98 tokens a step break even, 33% of the drafts accepted" in said.out + said.err
    latent = pipeline.run("kimi-k2.5", ("train.architecture=mla",), str(tmp_path / "latent"), last="plan")[
        "plan"
    ]
    assert latent["memory_bytes"]["train"] is None
    assert latent["disk_bytes"]["drafters"] < made["disk_bytes"]["drafters"]


def test_widths_that_are_not_stated_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="does not state v_head_dim"):
        pipeline.open_run(
            "kimi-k2.5", ("train.architecture=mla", "target.facts.v_head_dim=null"), str(tmp_path / "run")
        )
