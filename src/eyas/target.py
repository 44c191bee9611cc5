"""What is known of a target without running it: sizes, tokenizer, stop ids, final norm, embedding and head rows.

Reads config.json, generation_config.json, tokenizer files and single tensors of the safetensors files of a local
model folder. Never loads the whole model.

Shapes: T tokens, D target width, V target vocabulary, W draft vocabulary.
"""

import hashlib
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eyas.errors import ContractError, UsageError

if TYPE_CHECKING:
    import torch

SAMPLED_BLOCKS = 16
BLOCK_BYTES = 65536
WRITERS_NOTES = {"transformers_version", "_name_or_path", "_model_name_or_path"}
OTHER_VOCABULARIES = (
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
)  # beside or instead of tokenizer.json
ONE_PLUS_WEIGHT = {"gemma", "gemma2", "gemma3", "gemma3_text"}  # norms scale by (1 + w)


class Decision(NamedTuple):
    """A derived value with the reason that is printed and recorded."""

    value: Any
    reason: str


@dataclass(frozen=True)
class Target:
    """A target's facts. `config` is the text model's (nested text_config already taken)."""

    folder: Path
    config: dict[str, Any]
    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    eps: float
    rope_theta: float
    context: int
    stop_ids: tuple[int, ...]
    identity: str
    files: dict[str, Path] = field(repr=False)

    @property
    def latent(self) -> bool:
        """Whether its attention keeps a compressed vector instead of keys and values (MLA)."""
        return bool(self.config.get("kv_lora_rank"))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of what a drafter depends on: the config, the vocabulary, the template, the weight files' names, headers and
        sampled blocks. Which library version wrote the files does not count."""
        h = hashlib.sha256()
        configs = [
            _without_notes(_optional(self.folder / n)) for n in ("config.json", "generation_config.json")
        ]
        tokens = _optional(self.folder / "tokenizer.json")
        vocabulary = [(tokens.get("model") or {}).get("vocab"), tokens.get("added_tokens")]
        template = _optional(self.folder / "tokenizer_config.json").get("chat_template")
        h.update(json.dumps([configs, vocabulary, template], sort_keys=True).encode())
        for name in ("chat_template.jinja", *OTHER_VOCABULARIES):
            path = self.folder / name
            h.update(name.encode() + (path.read_bytes() if path.is_file() else b"-"))
        for path in sorted(set(self.files.values())):
            size = path.stat().st_size
            h.update(f"{path.name} {size}".encode())
            with path.open("rb") as f:
                h.update(f.read(8 + min(int.from_bytes(f.read(8), "little"), size)))
                for i in range(SAMPLED_BLOCKS):
                    f.seek(size * i // SAMPLED_BLOCKS)
                    h.update(f.read(BLOCK_BYTES))
        return h.hexdigest()[:16]

    def cache_bytes(self, value_bytes: int) -> int:
        """Keys and values of one token in all layers; with latent attention what they are made of."""
        if self.latent:
            return (
                self.layers
                * (self.config["kv_lora_rank"] + (self.config.get("qk_rope_head_dim") or 0))
                * value_bytes
            )
        return 2 * self.layers * self.kv_heads * self.head_dim * value_bytes

    def default_aux_layers(self) -> Decision:
        """[2, n//2, n-3] for n layers: SafeAILab EAGLE, vLLM and speculators alike (id i = input of layer i).

        Raises UsageError for a target too shallow to have three distinct ones.
        """
        n = self.layers
        ids = [2, n // 2, n - 3]
        if not 2 < n // 2 < n - 3:
            raise UsageError(
                f"{self.folder}: no default aux layers for {n} layers. Set target.aux_layers, ids between 0 and {n} "
                "(id i = input of layer i, n = last output before the final norm)."
            )
        return Decision(ids, f"[2, n//2, n-3] for {n} layers, as engines default to")

    def check_aux_layers(self, ids: list[int]) -> list[int]:
        """Ascending, distinct, 0..n. Engines capture in ascending order whatever the list says.

        Raises UsageError otherwise.
        """
        if not ids or sorted(set(ids)) != ids or ids[0] < 0 or ids[-1] > self.layers:
            raise UsageError(
                f"target.aux_layers is {ids}: need distinct ids in ascending order between 0 and {self.layers} "
                f"({self.folder} has {self.layers} layers; id i = input of layer i)."
            )
        return ids

    def tensor_name(self, suffix: str) -> str | None:
        """The one weight outside the decoder layers whose name ends so, whatever the prefix; None if absent.

        Raises ContractError when several do.
        """
        found = [n for n in self.files if (n == suffix or n.endswith("." + suffix)) and ".layers." not in n]
        found = [n for n in found if not n.startswith(("vision", "visual")) and ".vision" not in n]
        if len(found) > 1:
            raise ContractError(f"{self.folder}: several tensors could be {suffix}: {', '.join(found)}")
        return found[0] if found else None

    def tensor(self, suffix: str) -> "torch.Tensor":
        from safetensors import safe_open

        name = self.tensor_name(suffix)
        if name is None:
            raise ContractError(f"{self.folder}: no tensor {suffix} in the safetensors files.")
        with safe_open(self.files[name], framework="pt") as f:
            return f.get_tensor(name)

    def embedding_VD(self) -> "torch.Tensor":
        return self.tensor("embed_tokens.weight")

    def head_VD(self) -> "torch.Tensor":
        """The output head; the embedding where the config ties them.

        Raises ContractError where there is no head and the config does not tie.
        """
        if self.tensor_name("lm_head.weight"):
            return self.tensor("lm_head.weight")
        if not self.config.get("tie_word_embeddings", False):
            raise ContractError(
                f"{self.folder}: no lm_head.weight, and config.json does not tie it to the embedding."
            )
        return self.embedding_VD()

    def final_norm_D(self) -> "torch.Tensor":
        """The scale that the final norm applies, float32 ((1 + w) families already added)."""
        weight = self.tensor("norm.weight").float()
        return weight + 1 if self.model_type in ONE_PLUS_WEIGHT else weight

    def added_tokens(self) -> dict[str, int]:
        """Special and added tokens of tokenizer.json by their text; empty where there is no such file."""
        listed = _optional(self.folder / "tokenizer.json").get("added_tokens")
        rows = listed if isinstance(listed, list) else []
        return {r["content"]: r["id"] for r in rows if isinstance(r, dict) and {"content", "id"} <= r.keys()}

    def tokenizer(self, trust_remote_code: bool = False) -> Any:
        """The tokenizer. Raises UsageError when it is missing, broken, has no chat template, or is code that may not run."""
        from transformers import AutoTokenizer

        code = (_optional(self.folder / "tokenizer_config.json").get("auto_map") or {}).get("AutoTokenizer")
        if code and not trust_remote_code and not (self.folder / "tokenizer.json").is_file():
            name = code[0] if isinstance(code, list) and code else code
            raise UsageError(
                f"{self.folder}: the tokenizer is code that comes with the model ({str(name).partition('.')[0]}.py), and without it "
                "transformers makes up another one from its files, which splits texts otherwise. Read that file; then set "
                "target.trust_remote_code: true, which lets it run, here and in the server. (A check without a recipe takes stored answers: --on.)"
            )
        try:
            tok = AutoTokenizer.from_pretrained(
                self.folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except (OSError, ValueError, KeyError) as e:
            raise UsageError(f"{self.folder}: no usable tokenizer ({' '.join(str(e).split())[:200]}).") from e
        if not tok.chat_template:
            raise UsageError(
                f"{self.folder}: the tokenizer has no chat template; eyas trains on chats as a server renders them."
            )
        return tok


def load(folder: str | Path) -> Target:
    """Read a target's facts from a local folder.

    Raises UsageError when the folder, its config.json or its safetensors files are missing or unusable.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(
            f"target.model: {folder} is not a folder. Give the path of a model folder, or get a small one with "
            '"eyas fetch smollm2-135m".'
        )
    outer = _json(folder / "config.json", f"{folder} has no config.json, so it is not a model folder.")
    config = outer.get("text_config") or outer
    if not isinstance(config, dict):
        raise UsageError(f"{folder}/config.json: text_config is a {type(config).__name__}, not an object")
    read = _Numbers(folder / "config.json", config)
    hidden, heads = read.whole("hidden_size"), read.whole("num_attention_heads")
    rope = config.get("rope_parameters")
    theta = config.get("rope_theta") or (rope.get("rope_theta") if isinstance(rope, dict) else None)
    tie = outer.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    return Target(
        folder=folder,
        config={**config, "tie_word_embeddings": bool(tie)},
        model_type=str(config.get("model_type") or outer.get("model_type") or "unknown"),
        hidden=hidden,
        layers=read.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=read.whole("num_key_value_heads", heads),
        head_dim=_head_dim(read, config, max(1, hidden // heads)),
        mlp=read.whole("intermediate_size", 4 * hidden),
        vocab=read.whole("vocab_size"),
        eps=read.real("rms_norm_eps", config.get("rms_norm_eps"), 1e-6),
        rope_theta=read.real("rope_theta", theta, 10000.0),
        context=read.whole("max_position_embeddings", 2048),
        stop_ids=_stop_ids(folder, outer, config),
        identity=_identity(folder),
        files=_weight_files(folder),
    )


def _head_dim(read: "_Numbers", config: dict[str, Any], split: int) -> int:
    """Width of a head; with latent attention that of a value's, since head_dim is then said of what is rotated, or of nothing."""
    return read.whole("v_head_dim" if config.get("kv_lora_rank") else "head_dim", split)


class _Numbers(NamedTuple):
    """Numbers of a config.json, or a UsageError that names the key and what was found."""

    path: Path
    config: dict[str, Any]

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if value is None:
            raise UsageError(f"{self.path}: {key} is missing; not a decoder-only language model?")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**40:
            raise UsageError(f"{self.path}: {key} is {value!r:.60}; need a whole number above 0")
        return value

    def real(self, key: str, value: Any, default: float) -> float:
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UsageError(f"{self.path}: {key} is {value!r:.60}; need a number above 0")
        return float(value)


def from_facts(folder: Path, facts: dict[str, Any]) -> Target:
    """A target that is not on this machine, from its sizes alone; enough to plan."""
    return Target(
        folder=folder,
        config=facts,
        model_type=facts["model_type"],
        hidden=facts["hidden_size"],
        layers=facts["num_hidden_layers"],
        heads=facts["num_attention_heads"],
        kv_heads=facts["num_key_value_heads"],
        head_dim=facts["head_dim"],
        mlp=facts["intermediate_size"],
        vocab=facts["vocab_size"],
        eps=1e-6,
        rope_theta=10000.0,
        context=facts["max_position_embeddings"],
        stop_ids=(),
        identity=f"{folder.name}, from facts alone",
        files={},
    )


def _optional(path: Path) -> dict[str, Any]:
    return _json(path, "") if path.is_file() else {}


def _without_notes(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in WRITERS_NOTES}


def _json(path: Path, absent: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise UsageError(absent) from e
    except (ValueError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise UsageError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _stop_ids(folder: Path, outer: dict, config: dict) -> tuple[int, ...]:
    """Every id that ends a turn, wherever it is named: a chat turn's end may be in generation_config.json alone, the end of a text in
    config.json alone, and servers stop at both."""
    path = folder / "generation_config.json"
    sources = [_json(path, "")] if path.is_file() else []
    out: set[int] = set()
    for source in [*sources, outer, config]:
        ids = source.get("eos_token_id")
        if ids is not None:
            found = ids if isinstance(ids, list) else [ids]
            if not found or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in found):
                raise UsageError(f"{folder}: eos_token_id is {ids!r:.60}; need a token id or a list of them")
            out.update(found)
    if out:
        return tuple(sorted(out))
    raise UsageError(
        f"{folder}: no eos_token_id in generation_config.json or config.json, so no answer could end."
    )


def _identity(folder: Path) -> str:
    """What the weights are beyond their shape, as `eyas fetch` recorded it; else the folder's name."""
    path = folder / "eyas_source.json"
    return str(_optional(path).get("identity", folder.resolve().name))


def _weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index or from the headers. Raises UsageError where there is no safetensors file."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = {name: folder / file for name, file in _json(index, "")["weight_map"].items()}
        lost = sorted({str(p.name) for p in files.values() if not p.is_file()})
        if lost:
            raise UsageError(
                f"{index} names {', '.join(lost[:3])}, which {'is' if len(lost) == 1 else 'are'} not there."
            )
        return files
    names: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as f:  # names alone, without torch
                names |= dict.fromkeys(f.keys(), path)
        except (SafetensorError, OSError) as e:
            raise UsageError(f"{path} is not a readable safetensors file ({e}). Fetch it again.") from e
    if not names:
        others = sorted(p.name for p in folder.iterdir() if p.suffix in {".gguf", ".bin", ".pt", ".pth"})
        found = f" Found {', '.join(others[:3])}: convert it to safetensors first." if others else ""
        raise UsageError(f"{folder} has no *.safetensors weights.{found}")
    return names
