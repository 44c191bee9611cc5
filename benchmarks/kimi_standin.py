"""A stand-in for Kimi-K2.5 of some 35 million parameters, with everything that makes the real one hard.

    python benchmarks/kimi_standin.py FOLDER [--text RUN] [--steps 2000] [--random] [--experts 16] [--layers 8]

config.json nests the language model (kimi_k25, text_config kimi_k2) beside a small vision tower; names of weights begin with
language_model.; the graph is DeepSeek-V3's (latent attention, a dense layer, experts behind a sigmoid router), rope is scaled by YaRN; weights
come in shards with an index; the tokenizer is Python over tiktoken under remote code; a turn ends with <|im_end|>, and [EOS] stops too;
the template has thoughts on and off, emptied history and tools. Latent widths are the real ones (512 + 64, 128, 128), which CPU kernels
are written for.

Weights are trained on chats: RUN's answers (a finished generate of any run), each with a short thought, and tool calls made up here. --random
leaves them random, sharpened so that greedy answers are stable.
"""

import argparse
import base64
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig, Kimi_K25Config, Kimi_K25ForConditionalGeneration

HERE = Path(__file__).parent
TEMPLATE = HERE.parent / "tests" / "golden" / "chat" / "kimi-k2.5.jinja"
SPECIAL = (
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<think>", "</think>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>", "[PAD]",
)  # fmt: skip
RESERVED = 64  # ids after the byte pairs
IMAGES = {  # what a server reads before it serves text
    "in_patch_limit": 256, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_kernel_size": 2,
    "fixed_output_tokens": None, "patch_limit_on_one_side": 64, "in_patch_limit_each_frame": 64, "in_patch_limit_video": 256,
    "sample_fps": 2.0, "max_num_frames_each_video": None, "temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff",
}  # fmt: skip
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
    },
}  # fmt: skip


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, help="a run folder whose generate is done")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=16)
    a = parser.parse_args(words)
    if not a.random and a.text is None:
        parser.error("--text RUN to train on, or --random")
    a.folder.mkdir(parents=True, exist_ok=True)
    chats = list(made_up_chats(400)) + (list(answered(a.text)) if a.text else [])
    tokenizer = write_tokenizer(a.folder, chats, a.vocab)
    a.vocab = len(tokenizer)  # texts too short for that many pairs give fewer
    model = build(a, tokenizer)
    if a.random:
        sharpen(model)
    else:
        train(model, tokenizer, chats, a)
    save(a.folder, model, tokenizer)
    count = sum(
        p.numel() for n, p in model.named_parameters() if "vision" not in n and "mm_projector" not in n
    )
    print(f"{a.folder}: {count / 1e6:.1f} M parameters in the language model, vocabulary {a.vocab:,}")


# ---- chats ----


def made_up_chats(count: int) -> Iterator[dict[str, Any]]:
    """Questions for sums, which a tool answers."""
    chance = random.Random(0)
    for _ in range(count):
        a, b = chance.randrange(100), chance.randrange(100)
        call = {
            "id": "functions.add:0",
            "type": "function",
            "function": {"name": "add", "arguments": {"a": a, "b": b}},
        }
        yield {
            "tools": [ADD],
            "messages": [
                {"role": "user", "content": f"What is {a} plus {b}?"},
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": f"I need add for {a} and {b}.",
                    "tool_calls": [call],
                },
            ],
        }


def answered(run: Path) -> Iterator[dict[str, Any]]:
    """A run's first turns, each with a thought that says what was asked."""
    from eyas import recipe
    from eyas import target as targets
    from eyas.stores import conversations

    read, _ = recipe.read(recipe.find(str(run)), ())
    tokenizer = targets.load(read.target.model).tokenizer()
    for row in conversations.read(run / "conversations"):
        text = tokenizer.decode(row.prompt_ids)
        question = text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0].strip()
        if row.turn or not row.text or not question:
            continue
        thought = f"The user wants: {' '.join(question.split()[:8])}."
        yield {
            "tools": None,
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": row.text.strip(), "reasoning_content": thought},
            ],
        }


# ---- tokenizer ----


def write_tokenizer(folder: Path, chats: list[dict[str, Any]], vocab: int) -> Any:
    """Byte pairs learned from the chats, as tiktoken's ranks."""
    import sys

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    sys.path.insert(0, str(HERE / "kimi_files"))
    from tokenization_standin import _characters

    texts = [f"{m['content']} {m.get('reasoning_content', '')}" for c in chats for m in c["messages"]]
    texts += [json.dumps(c["tools"]) for c in chats if c["tools"]]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - RESERVED, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bytes_of = {c: b for b, c in _characters().items()}
    ranked = sorted(bpe.get_vocab().items(), key=lambda kv: kv[1])
    tokens = [bytes(bytes_of[c] for c in t) for t, _ in ranked]
    lines = [f"{base64.b64encode(t).decode()} {n}" for n, t in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n", encoding="ascii")
    shutil.copy(HERE / "kimi_files" / "tokenization_standin.py", folder)
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    first = len(tokens)
    names = [*SPECIAL, *(f"<|reserved_{i}|>" for i in range(RESERVED - len(SPECIAL)))]
    added = {
        str(first + i): {
            "content": n, "special": n not in ("<think>", "</think>"), "lstrip": False, "rstrip": False, "normalized": False,
            "single_word": False,
        }
        for i, n in enumerate(names)
    }  # fmt: skip
    config = {
        "tokenizer_class": "StandinTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_standin.StandinTokenizer", None]},
        "added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]",
        "additional_special_tokens": [n for n in names if n not in ("<think>", "</think>", "[BOS]", "[EOS]", "[PAD]")],
        "model_max_length": 16384, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


# ---- model ----


def build(a: argparse.Namespace, tokenizer: Any) -> Any:
    torch.manual_seed(0)
    text = {
        "model_type": "deepseek_v3", "vocab_size": a.vocab, "hidden_size": a.hidden, "intermediate_size": 4 * a.hidden,
        "moe_intermediate_size": a.hidden, "num_hidden_layers": a.layers, "num_attention_heads": 4, "num_key_value_heads": 4,
        "n_shared_experts": 1, "n_routed_experts": a.experts, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "norm_topk_prob": True, "q_lora_rank": 128, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 16384,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "original_max_position_embeddings": 256, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False, "num_mtp_layers": 0,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    vision = {
        "patch_size": 14, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 4, "num_attention_heads": 2, "num_hidden_layers": 1,
        "hidden_size": 32, "intermediate_size": 64,
    }  # fmt: skip
    config = Kimi_K25Config(
        text_config=text, vision_config=vision, projection_hidden_size=32, tie_word_embeddings=False,
        image_token_id=tokenizer.convert_tokens_to_ids("<|media_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|media_begin|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|media_end|>"),
        video_token_id=a.vocab,
    )  # fmt: skip
    return Kimi_K25ForConditionalGeneration(config).to("cuda" if torch.cuda.is_available() else "cpu")


def sharpen(model: Any) -> None:
    """Random weights under which greedy answers are stable and layers can be told apart."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.copy_(torch.randn_like(p) * (0.9 if "lm_head" in name else 0.15))
                if "language_model" in name and name.endswith(
                    ("o_proj.weight", "down_proj.weight", "experts.down_proj")
                ):
                    p.mul_(1.4 ** int(name.partition("layers.")[2].partition(".")[0]))
            else:
                p.copy_(1 + 0.1 * torch.randn_like(p))


def rendered(tokenizer: Any, chat: dict[str, Any]) -> list[int]:
    return tokenizer.apply_chat_template(chat["messages"], tools=chat["tools"], return_dict=True)["input_ids"]


def train(model: Any, tokenizer: Any, chats: list[dict[str, Any]], a: argparse.Namespace) -> None:
    """Next tokens of whole chats, packed; thoughts on in half of them, off in the others."""
    device = next(model.parameters()).device
    rows = []
    for i, chat in enumerate(chats):
        if i % 2 and not chat["tools"]:
            chat["messages"][-1]["reasoning_content"] = ""
        rows.append(rendered(tokenizer, chat))
    parameters = [p for n, p in model.named_parameters() if "vision" not in n and "mm_projector" not in n]
    matrices = [p for p in parameters if p.dim() > 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}],
        betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    chance = random.Random(1)
    stream: list[list[int]] = []
    began, seen = time.perf_counter(), 0
    for step in range(a.steps):
        batch: list[list[int]] = []
        while sum(map(len, batch)) < a.tokens:
            if not stream:
                stream = chance.sample(rows, len(rows))
            batch.append(stream.pop()[:1024])
        longest = max(map(len, batch))
        ids = torch.full((len(batch), longest), tokenizer.pad_token_id)
        labels = torch.full_like(ids, -100)
        for i, row in enumerate(batch):
            ids[i, : len(row)] = labels[i, : len(row)] = torch.tensor(row)
        rate = a.lr * min(1.0, (step + 1) / 100) * (1 - 0.9 * step / a.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=ids.to(device), use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        seen += sum(map(len, batch))
        if step % 50 == 0 or step == a.steps - 1:
            spent = time.perf_counter() - began
            print(
                f"step {step}: loss {loss.item():.3f}, {seen / spent:,.0f} tokens/s, {spent:.0f} s",
                flush=True,
            )


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    """Shards with an index under the real names, and config.json as the real one's."""
    model = model.to("cpu", torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"))
    model.save_pretrained(folder, max_shard_size="1TB")
    shards(folder, "20MB")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "media_placeholder_token_id": config["image_token_id"],
    }
    config["text_config"] |= {
        "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "ep_size": 1, "moe_layer_freq": 1,
    }  # fmt: skip
    path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    shutil.copy(HERE / "kimi_files" / "image_processing_standin.py", folder)
    images = {
        "auto_map": {"AutoImageProcessor": "image_processing_standin.StandinImageProcessor"},
        "media_proc_cfg": IMAGES,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images, indent=1) + "\n", encoding="utf-8")
    (folder / "eyas_source.json").write_text(
        json.dumps({"identity": "a stand-in for Kimi-K2.5"}) + "\n", encoding="utf-8"
    )


NAMES = {  # as transformers writes them, where that is not how the real checkpoint has them
    "language_model.model.blocks.": "language_model.model.layers.",
    "model.mm_projector.": "mm_projector.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
}


def shards(folder: Path, most: str) -> None:
    """The one file that was written, as shards with the real names and an index."""
    tensors = {}
    for name, x in load_file(folder / "model.safetensors").items():
        old = next((o for o in NAMES if name.startswith(o)), None)
        tensors[NAMES[old] + name.removeprefix(old) if old else name] = x
    (folder / "model.safetensors").unlink()
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=most)
    for file, names in split.filename_to_tensors.items():
        save_file({n: tensors[n] for n in names}, folder / file, {"format": "pt"})
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
