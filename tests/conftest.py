"""Small real things instead of mocks: a seeded Llama of hidden size 32 with a byte tokenizer, saved as a model folder."""

import json
import random
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eyas import pipeline
from eyas.contract import Contract, Norms
from eyas.drafter.network import Drafter
from eyas.stores.states import RowStates

SPECIAL = ["<pad>", "<user>", "<assistant>", "<end>"]
END = 3
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<assistant>{{ m.content }}<end>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = [
    "tell",
    "me",
    "why",
    "the",
    "red",
    "fox",
    "ran",
    "over",
    "a",
    "slow",
    "green",
    "hill",
    "and",
    "what",
    "it",
    "saw",
    "near",
    "our",
    "old",
    "mill",
    "today",
]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate([*SPECIAL, *alphabet])}
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, eos_token="<end>", pad_token="<pad>", chat_template=TEMPLATE
    )


def save_target(
    folder: Path,
    layers: int = 2,
    vocab: int = 260,
    seed: int = 0,
    sharpness: float = 6.0,
    grows: float = 1.0,
    **extra,
) -> Path:
    """A random target whose distributions are peaked enough for greedy chains to be stable. grows: what layers add, layer by layer."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "eos_token_id": END, "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**settings | extra))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.copy_(torch.randn(p.shape) * (0.15 if "lm_head" not in name else 0.15 * sharpness))
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    p.mul_(grows ** int(name.split(".")[2]))
            else:
                p.copy_(1 + 0.1 * torch.randn(p.shape))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rng = random.Random(0)
    lines = []
    for i in range(24):
        turns = [" ".join(rng.choices(WORDS, k=rng.randint(2, 6))) + f" {i}" for _ in range(1 + (i % 8 == 0))]
        lines.append(json.dumps({"id": f"p{i}", "domain": "ab"[i % 2], "turns": turns}))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def write_recipe(path: Path, target: Path, prompts: Path) -> Path:
    """The whole life on the tiny target in some seconds."""
    recipe = {
        "name": "tiny",
        "target": {"model": str(target), "dtype": "float32", "aux_layers": [0, 1, 2]},
        "prompts": {"sources": [{"path": str(prompts)}], "held_out": 0.3},
        "generate": {"max_tokens": 16, "concurrency": 6},
        "extract": {"shard_bytes": 200_000},
        "train": {
            "draft_vocab": 128,
            "ttt_steps": 3,
            "epochs": 2,
            "tokens_per_step": 256,
            "micro_tokens": 128,
        },
        "bench": {"k": [1, 3], "rounds": 2, "limit": 3, "max_tokens": 12},
    }
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@pytest.fixture
def recipe_file(tmp_path, target_folder, prompt_file) -> Path:
    return write_recipe(tmp_path / "tiny.yaml", target_folder, prompt_file)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, target_folder, prompt_file):
    """One complete run, shared: recipe file, run folder, manifests by stage. Tests that change it copy it."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = write_recipe(folder / "tiny.yaml", target_folder, prompt_file)
    return recipe, folder / "run", pipeline.run(str(recipe), (), str(folder / "run"))


def contract(**changes) -> Contract:
    """A small drafter's contract."""
    fields = {
        "target_model_type": "llama", "target_fingerprint": "f" * 16, "target_identity": "tiny", "target_layers": 4,
        "hidden": 16, "mlp": 24, "heads": 4, "kv_heads": 2, "head_dim": 4, "vocab": 40, "draft_vocab": 24, "eps": 1e-5,
        "rope_theta": 10000.0, "context": 128, "trained_length": 32, "aux_layers": (1, 2, 3),
        "norms": Norms(before_residual=False, fc="chunks", output=False), "ttt_steps": 3, "stop_ids": (3,),
    }  # fmt: skip
    return Contract(**fields | changes)


def drafter(seed: int = 0, **changes) -> Drafter:
    """A drafter with random weights (norms too) and a random ascending vocabulary that holds id 3."""
    c = contract(**changes)
    made = Drafter(c)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.4 if p.dim() == 2 else 0.2) + (p.dim() == 1))
        others = torch.randperm(c.vocab - 4, generator=g)[: c.draft_vocab - 4] + 4
        kept = torch.cat([torch.arange(4), others]).sort().values
        made.d2t_W.copy_(kept - torch.arange(len(kept)))
    return made.eval()


def random_row(length: int, start: int, seed: int, c: Contract | None = None) -> RowStates:
    c = c or contract()
    g = torch.Generator().manual_seed(seed)
    return RowStates(
        f"{seed:016x}",
        torch.randint(0, c.vocab, (length,), generator=g, dtype=torch.int32),
        torch.randn(length, len(c.aux_layers), c.hidden, generator=g),
        torch.randn(length, c.hidden, generator=g),
        torch.randint(0, c.vocab, (length,), generator=g, dtype=torch.int32),
        start,
    )
