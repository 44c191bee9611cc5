"""What users bring by mistake: each gives an exit code of 2 or 3, one message, no traceback, and loses nothing."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas import pipeline
from eyas.errors import ContractError, SurroundingsError, UsageError
from eyas.rundir import file_hash, read_json, write_json
from eyas.stores import conversations
from tests.conftest import TEMPLATE, save_target


def run(recipe_file, folder, *sets, first=None, last=None):
    return pipeline.run(str(recipe_file), sets, str(folder), first, last)


def edit(path: Path, **values):
    write_json(path, {k: v for k, v in (read_json(path) | values).items() if v is not None})


@pytest.fixture
def own_target(tmp_path):
    return save_target(tmp_path / "own")


def test_an_unknown_architecture(recipe_file, tmp_path, own_target):
    edit(own_target / "config.json", model_type="nonsense", architectures=["NonsenseForCausalLM"])
    with pytest.raises(UsageError, match=r"transformers cannot load this model \(model_type nonsense\)"):
        run(recipe_file, tmp_path / "r", f"target.model={own_target}", last="plan")


def test_a_target_without_tokenizer(recipe_file, tmp_path, own_target):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (own_target / name).unlink()
    with pytest.raises(UsageError, match=r"no usable tokenizer|no chat template"):
        run(recipe_file, tmp_path / "r", f"target.model={own_target}", last="plan")


def test_a_vocabulary_larger_than_the_tokenizers_is_fine(recipe_file, tmp_path):
    padded = save_target(tmp_path / "padded", vocab=320)
    made = run(recipe_file, tmp_path / "r", f"target.model={padded}", last="check")
    assert made["check"]["healthy"]


def test_a_tied_target_goes_through_every_stage(recipe_file, tmp_path):
    tied = save_target(tmp_path / "tied", tie_word_embeddings=True)
    made = run(recipe_file, tmp_path / "r", f"target.model={tied}")
    assert made["extract"]["checks"]["head_agreement"] == 1.0
    config = read_json(tmp_path / "r" / "drafter" / "best" / "config.json")
    assert config["tie_word_embeddings"] is False


def prompts_with(tmp_path, prompt_file, *lines: bytes):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(prompt_file.read_bytes() + b"\n" + b"\n".join(lines))
    return f"prompts.sources=[{{path: {path}}}]"


def test_a_template_that_raises_for_a_role_leaves_out_those_prompts(
    recipe_file, tmp_path, own_target, prompt_file
):
    raising = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% endfor %}"
    (own_target / "chat_template.jinja").write_text(raising + TEMPLATE)
    line = b'{"id": "sys", "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]}'
    made = run(
        recipe_file,
        tmp_path / "r",
        f"target.model={own_target}",
        prompts_with(tmp_path, prompt_file, line),
        last="generate",
    )
    assert made["generate"]["quarantined"] == 1
    left_out = json.loads((tmp_path / "r" / "conversations" / "quarantine.jsonl").read_text())
    assert left_out["where"] == "sys" and "no system role" in left_out["reason"]


def test_a_prompt_longer_than_the_context_is_left_out_with_its_length(recipe_file, tmp_path, prompt_file):
    long = json.dumps({"id": "long", "prompt": "word " * 200_000}).encode()  # 1 MB
    made = run(recipe_file, tmp_path / "r", prompts_with(tmp_path, prompt_file, long), last="generate")
    assert made["generate"]["quarantined"] == 1
    assert "exceed the context of 256" in (tmp_path / "r" / "conversations" / "quarantine.jsonl").read_text()


def test_answers_of_one_token_are_kept_but_teach_nothing(recipe_file, tmp_path, own_target):
    """A target that ends every turn at once: rows without a pair, and a clear word in train."""
    tensors = load_file(own_target / "model.safetensors")
    tensors["lm_head.weight"].zero_()
    tensors["model.norm.weight"].fill_(1.0)
    save_file(tensors, own_target / "model.safetensors")
    edit(own_target / "generation_config.json", eos_token_id=0)
    edit(own_target / "config.json", eos_token_id=0)
    sets = (f"target.model={own_target}", "generate.temperature=0")
    run(recipe_file, tmp_path / "r", *sets, last="generate")
    assert {len(r.completion_ids) for r in conversations.read(tmp_path / "r" / "conversations")} == {1}
    with pytest.raises(ContractError, match="0 training and 0 held-out rows with an answer of two tokens"):
        run(recipe_file, tmp_path / "r", *sets, last="train")


def test_states_that_are_not_finite_are_named(recipe_file, tmp_path, own_target):
    run(recipe_file, tmp_path / "r", f"target.model={own_target}", last="generate")
    tensors = load_file(own_target / "model.safetensors")
    broken = tmp_path / "broken"
    save_target(broken)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ContractError, match=r"row [0-9a-f]{16} .*not finite"):
        run(recipe_file, tmp_path / "r2", f"target.model={broken}", "generate.temperature=0", last="extract")


def test_a_loss_that_is_not_finite_stops_with_the_rows(recipe_file, tmp_path, monkeypatch):
    from eyas.drafter.gradients import Gradients

    real = Gradients.add

    def poisoned(*args):
        loss = real(*args)
        return loss._replace(total=loss.total * float("nan"))

    monkeypatch.setattr(Gradients, "add", poisoned)
    with pytest.raises(
        ContractError, match=r"in a row were skipped.*its loss is not finite \(rows [0-9a-f]{16}"
    ):
        run(recipe_file, tmp_path / "r", last="train")


def test_foreign_states_are_refused_by_their_ids(recipe_file, tmp_path):
    """A shard of another run, with a manifest that vouches for it."""
    run(recipe_file, tmp_path / "a", "prompts.limit=8", last="extract")
    run(recipe_file, tmp_path / "b", "prompts.limit=8", "generate.max_tokens=12", last="extract")
    shards = sorted((tmp_path / "a" / "states").glob("shard-*"))
    shards[0].write_bytes((tmp_path / "b" / "states" / shards[0].name).read_bytes())
    manifest = read_json(tmp_path / "a" / "states" / "manifest.json")
    manifest["content"][0]["sha256"] = file_hash(shards[0])
    write_json(tmp_path / "a" / "states" / "manifest.json", manifest)
    with pytest.raises(ContractError, match=r"is not in .*conversations with these ids"):
        run(recipe_file, tmp_path / "a", "prompts.limit=8", last="train")


STAGE_BEFORE = {
    "generate": "plan",
    "extract": "generate",
    "train": "extract",
    "bench": "check",
    "report": "verdict",
}


@pytest.mark.parametrize("stage", STAGE_BEFORE)
def test_a_full_disk_in_each_stage_exits_3_and_loses_nothing(recipe_file, tmp_path, stage):
    """No file may grow beyond two kilobytes: every writer meets a disk error, and the run can go on afterwards."""
    folder = tmp_path / "r"
    run(recipe_file, folder, last=STAGE_BEFORE[stage])
    command = [sys.executable, "-m", "eyas", "run", str(recipe_file), "--run", str(folder), "--until", stage]

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))

    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=small_files, env=environment, timeout=60
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr and "finished is kept" in done.stderr, done.stderr
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_a_folder_that_cannot_be_written(recipe_file):
    with pytest.raises(SurroundingsError, match=r"cannot write into /dev/null/run"):
        run(recipe_file, "/dev/null/run", last="plan")


def test_out_of_memory_names_the_key_that_lowers_it(recipe_file, tmp_path, monkeypatch):
    from eyas.engines.hf import HFEngine

    def greedy_allocator(self, *args):
        torch.empty(2**60)

    monkeypatch.setattr(HFEngine, "generate", greedy_allocator)
    with pytest.raises(SurroundingsError, match=r"generate: out of memory .*Lower generate\.concurrency"):
        from eyas.plan import measure

        monkeypatch.setattr(
            measure,
            "rates",
            lambda *a: dict.fromkeys(
                ("decode_tokens_per_s", "pass_tokens_per_s", "supervised_tokens_per_s", "bench_tokens_per_s"),
                1.0,
            ),
        )
        run(recipe_file, tmp_path / "r", last="generate")


def test_planning_alone_does_not_need_the_model_but_the_rest_does(tmp_path):
    made = pipeline.run("kimi-k2.5", (), str(tmp_path / "k"), last="plan")
    assert made["plan"]["state_bytes_per_token"] == 57_344
    assert round(made["plan"]["disk_bytes"]["states"] / 1e9) == 828
    with pytest.raises(UsageError, match=r"models/kimi-k2\.5 is not on this machine"):
        pipeline.run("kimi-k2.5", (), str(tmp_path / "k"))


def nested_gemma(folder: Path) -> Path:
    """A multimodal Gemma-3: text_config nested, norms of (1 + w), sliding and full layers, an index of two files."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    save_target(folder)  # for its tokenizer and template
    (folder / "model.safetensors").unlink()
    text = {
        "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "sliding_window": 16,
        "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    torch.manual_seed(0)
    config = Gemma3Config(
        text_config=text, vision_config=vision, eos_token_id=3, mm_tokens_per_image=4, image_token_index=261,
        boi_token_index=262, eoi_token_index=263,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(
                torch.randn(p.shape) * (0.5 if p.dim() == 1 else 0.25 if "embed_tokens" not in name else 0.6)
            )
    model.save_pretrained(folder, max_shard_size="60KB")
    edit(folder / "generation_config.json", eos_token_id=3)
    return folder


def test_a_nested_sharded_target_of_another_family_goes_through_every_stage(recipe_file, tmp_path):
    folder = nested_gemma(tmp_path / "gemma")
    assert (folder / "model.safetensors.index.json").is_file()
    made = run(recipe_file, tmp_path / "r", f"target.model={folder}")
    assert made["extract"]["checks"]["head_agreement"] > 0.999
    assert made["check"]["healthy"]
    for cell in made["bench"]["cells"]:
        assert cell["outputs"]["fault"] == 0
        assert cell["tau_replayed"] == pytest.approx(cell["tau"]["value"], rel=0.03)


def test_a_target_in_bfloat16_passes_with_its_ties_counted(recipe_file, tmp_path):
    made = run(recipe_file, tmp_path / "r", "target.dtype=bfloat16", last="check")
    checks = made["extract"]["checks"]
    assert checks["head_agreement"] > 0.999 and checks["disk_agreement"] > 0.999
    assert made["check"]["healthy"]
