"""The recipe: what a user asks for, typed and frozen.

Reads a YAML file (or the name of a shipped one, or the recipe.yaml of a run folder), applies `--set a.b=c`, refuses
unknown keys with the nearest valid name, and resolves `auto` values with a reason. `eyas recipe show` prints it.
"""

import difflib
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from eyas.errors import RecipeError
from eyas.target import Target

SHIPPED = Path(__file__).parent / "recipes"
SHIPPED_DRAFTERS = SHIPPED / "drafters"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


def key(default: Any, reason: str, unit: str = "", **limits: Any) -> Any:
    """A recipe key: default, why that default, unit, limits."""
    return Field(default, description=reason, json_schema_extra={"unit": unit}, **limits)


class RatesSection(Section):
    """Rates to plan with where they cannot be measured; null means unknown, and is said."""

    decode_tokens_per_s: float | None = key(None, "generation, all endpoints together", "tokens/s", gt=0)
    pass_tokens_per_s: float | None = key(None, "reading stored ids in extract", "tokens/s", gt=0)
    supervised_tokens_per_s: float | None = key(None, "training at the recipe's TTT steps", "tokens/s", gt=0)
    bench_tokens_per_s: float | None = key(None, "one request, without the drafter", "tokens/s", gt=0)


class FactsSection(Section):
    """A target's sizes, named as in its config.json, and the traffic to plan for."""

    num_hidden_layers: int = Field(description="decoder layers", gt=0)
    hidden_size: int = Field(description="width of the hidden states", gt=0)
    num_attention_heads: int = Field(description="of the drafter's layer", gt=0)
    num_key_value_heads: int = Field(description="of the drafter's layer", gt=0)
    head_dim: int = Field(description="of the drafter's layer", gt=0)
    intermediate_size: int = Field(description="of the drafter's layer", gt=0)
    vocab_size: int = Field(description="target vocabulary", gt=0)
    weight_bytes: int = Field(description="all weights on disk", gt=0)
    answers: int = Field(description="conversations to plan for", gt=0)
    row_tokens: int = Field(description="tokens of a conversation, prompt and answer", gt=0)
    prompt_tokens: int = key(0, "of these, tokens of the prompt", "tokens", ge=0)
    model_type: str = key("unknown", "as in config.json")
    max_position_embeddings: int = key(131072, "context", "tokens", gt=0)
    rates: RatesSection = RatesSection()


class TargetSection(Section):
    model: str = Field(
        description="folder with config.json, tokenizer and safetensors of the target", min_length=1
    )
    dtype: Literal["auto", "bfloat16", "float32"] = key(
        "auto", "bfloat16 where the machine multiplies it natively, else float32; the choice is printed"
    )
    trust_remote_code: bool = key(False, "code that comes with a model runs only if you say so")
    aux_layers: Literal["auto"] | list[int] = key(
        "auto", "id i = input of layer i; auto is [2, n//2, n-3], what every engine defaults to", "layer ids"
    )
    facts: FactsSection | None = key(None, "sizes, to plan before the model is on this machine")


class EngineSection(Section):
    name: Literal["hf", "vllm"] = key("hf", "the embedded engine (transformers); needs no server")
    python: str | None = key(
        None,
        "Python of the engine's own environment; else EYAS_VLLM_PYTHON, `eyas engine setup`, PATH",
        min_length=1,
    )
    args: list[str] = key([], "added to the server's command line", "words")
    env: dict[str, str] = key(
        {}, "added to the server's environment; never put a key here: it is written to the run"
    )
    command: list[str] = key([], "put before the server's command line, as a container runtime's is", "words")


class PromptSource(Section):
    """Either a file of prompts, or a number of user turns that the target writes itself."""

    path: str | None = key(
        None, "JSONL with `turns`, `messages` or `prompt`; `builtin` is the shipped set", min_length=1
    )
    self_: int | None = Field(None, alias="self", description="user turns written by the target itself", ge=1)
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @model_validator(mode="after")
    def one(self) -> "PromptSource":
        if (self.path is None) == (self.self_ is None):
            raise ValueError("a source is either {path: FILE} or {self: NUMBER}")
        return self


class PromptsSection(Section):
    sources: list[PromptSource] = key(
        [PromptSource.model_validate({"path": "builtin"})], "430 prompts that ship with eyas", min_length=1
    )
    limit: int | None = key(
        None, "all that the files hold; a limit is spread evenly over the domains", "prompts", ge=1
    )
    held_out: float = key(
        0.1, "share kept from training to measure acceptance; decided by a hash", "share", gt=0, lt=0.9
    )
    keep_out: list[str] = key(
        [], "JSONL files whose prompts must not be trained on: 8-word overlap is left out", "files"
    )


class GenerateSection(Section):
    max_tokens: int = key(
        160, "long enough for a drafter to learn from, short enough for a CPU", "tokens", ge=4
    )
    temperature: float = key(
        0.8, "varied answers teach more than greedy ones; held-out answers are greedy", "", ge=0, le=5
    )
    top_p: float = key(
        1.0, "no truncation: the drafter learns what the target really emits", "share", gt=0, le=1
    )
    samples: int = key(1, "answers per training prompt", "answers", ge=1)
    concurrency: int = key(16, "rows decoded together; also the rows of one part file", "rows", ge=1)


class ExtractSection(Section):
    with_: Literal["auto", "pass"] = Field(
        "auto",
        alias="with",
        description="a pass over the stored ids; the embedded engine has no other way",
        json_schema_extra={"unit": ""},
    )
    dtype: Literal["bfloat16", "float32"] = key(
        "bfloat16", "aux states; half the disk of float32, no loss seen"
    )
    shard_bytes: int = key(268_435_456, "what a kill costs at most", "bytes", ge=1024)
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class NormsSection(Section):
    before_residual: bool = key(False, "what SGLang and SafeAILab drafters do; vLLM reads either")
    fc: Literal["none", "chunks", "whole"] = key(
        "chunks", "one RMSNorm per aux state before fc (EAGLE-3.1 fc_norm); whole = norm_before_fc"
    )
    output: bool = key(False, "true feeds norm(h) back instead of h (EAGLE-3.1 norm_output)")

    @field_validator("fc", mode="before")
    @classmethod
    def yes_no(cls, value: Any) -> Any:
        return {True: "chunks", False: "none"}.get(value, value) if isinstance(value, bool) else value


class TrainSection(Section):
    init_from: str | None = key(
        None,
        "from nothing; or a drafter folder of eyas, or the name of a shipped one, whose contract and vocabulary are kept",
        min_length=1,
    )
    draft_vocab: int = key(
        8192, "covers over 99 % of small sets; larger costs speed in every draft step", "tokens", ge=8
    )
    ttt_steps: int = key(5, "draft steps seen in training; the paper has 7", "steps", ge=1, le=16)
    ttt_decay: float = key(0.8, "weight of step k is decay^k (EAGLE-3 paper)", "", gt=0, le=1)
    loss: Literal["kl", "lk"] = key(
        "kl",
        "divergence from the target's distribution over the draft vocabulary; lk is -log of the acceptance of sampled drafts",
    )
    epochs: int = key(5, "best epoch is kept by held-out acceptance length", "epochs", ge=1)
    tokens_per_step: int = key(8192, "tokens of one optimizer step, prompts included", "tokens", ge=64)
    micro_tokens: int | Literal["auto"] = key(
        "auto", "tokens held in memory at once; the rest of a step is accumulated", "tokens"
    )
    lr: float = key(0.001, "AdamW peak rate, after 5 % warm-up, cosine to 2 % of it", "", gt=0, lt=1)
    norms: NormsSection = NormsSection()
    seed: int = key(0, "initial weights and order of rows", "", ge=0)


class BenchSection(Section):
    k: list[int] = key(
        [1, 2, 3, 5], "drafted tokens per step; the best is chosen from these", "tokens", min_length=1
    )
    concurrency: list[int] = key(
        [1], "requests at once; the embedded engine serves one", "requests", min_length=1
    )
    rounds: int = key(3, "each prompt is measured this often, k values interleaved", "rounds", ge=1)
    prompts: Literal["held_out"] = key("held_out", "prompts that training never saw")
    limit: int | None = key(
        None, "all held-out prompts; a limit takes them evenly by domain", "prompts", ge=1
    )
    max_tokens: int = key(160, "length limit of a measured answer", "tokens", ge=4)
    temperature: float = key(
        0.0, "greedy: outputs with and without the drafter can be compared", "", ge=0, le=5
    )

    @field_validator("k")
    @classmethod
    def positive(cls, value: list[int]) -> list[int]:
        if any(k < 1 or k > 16 for k in value) or len(set(value)) != len(value):
            raise ValueError("each k is 1..16, named once (the baseline k = 0 is always measured)")
        return sorted(value)

    @field_validator("concurrency")
    @classmethod
    def one(cls, value: list[int]) -> list[int]:
        if value != [1]:
            raise ValueError(
                "the embedded engine decodes one request at a time: set bench.concurrency to [1]"
            )
        return value


class VerdictSection(Section):
    min_speedup: float = key(1.05, "below this a drafter is not worth its memory and its risk", "times", ge=1)
    confidence: float = key(
        0.95, "the lower end of this interval must reach min_speedup", "share", gt=0.5, lt=1
    )


class ReportSection(Section):
    loggers: list[Literal["tensorboard"]] = key(
        [], "training curves also as event files (extra `tensorboard`)"
    )


class Recipe(Section):
    name: str = Field(
        description="names the run folder runs/NAME", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
    )
    target: TargetSection
    engine: EngineSection = EngineSection()
    prompts: PromptsSection = PromptsSection()
    generate: GenerateSection = GenerateSection()
    extract: ExtractSection = ExtractSection.model_validate({})
    train: TrainSection = TrainSection()
    bench: BenchSection = BenchSection()
    verdict: VerdictSection = VerdictSection()
    report: ReportSection = ReportSection()


@dataclass(frozen=True)
class Resolved:
    """A recipe with what it left to be derived; the one thing that stages read."""

    recipe: Recipe
    target: Target
    device: str  # cpu | cuda
    dtype: str  # what the target computes in
    aux_layers: list[int]  # ids in our numbering, ascending


class Value(NamedTuple):
    """One resolved key: what it is, where it came from (default, recipe, --set), why that is the default."""

    value: Any
    source: str
    reason: str


def shipped_names() -> list[str]:
    return sorted(p.stem for p in SHIPPED.glob("*.yaml"))


def find(word: str) -> Path:
    """The file behind a RECIPE or RUN argument.

    Raises RecipeError where there is neither a file, a run folder, nor a shipped recipe of that name.
    """
    path = Path(word)
    if path.is_dir():
        if (path / "recipe.yaml").is_file():
            return path / "recipe.yaml"
        raise RecipeError(
            f"{path} is a folder without recipe.yaml, so not a run folder. Name a recipe file or a run."
        )
    if path.is_file():
        return path
    if word in shipped_names():
        return SHIPPED / f"{word}.yaml"
    near = difflib.get_close_matches(word, shipped_names(), n=1)
    hint = f' Did you mean "{near[0]}"?' if near else f" Shipped recipes: {', '.join(shipped_names())}."
    raise RecipeError(f'no recipe "{word}": there is no such file, run folder or shipped recipe.{hint}')


def find_drafter(word: str) -> Path:
    """The folder of a drafter to start from: a path, or the name of a shipped one.

    Raises RecipeError where there is neither.
    """
    shipped = sorted(p.name for p in SHIPPED_DRAFTERS.iterdir()) if SHIPPED_DRAFTERS.is_dir() else []
    for folder in (Path(word), SHIPPED_DRAFTERS / word if word in shipped else Path(word)):
        if (folder / "contract.json").is_file():
            return folder
    raise RecipeError(
        f'"train.init_from": {word} is not a drafter folder of eyas (no contract.json there), nor a shipped drafter '
        f"({', '.join(shipped) or 'none'})."
    )


def read(path: Path, sets: tuple[str, ...] = ()) -> tuple[Recipe, dict[str, Value]]:
    """Read and validate a recipe; returns it and every key with its source.

    Raises RecipeError naming the file, the key, what was found and what would be valid.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Strict)
    except UnicodeDecodeError as e:
        raise RecipeError(f"{path}: not UTF-8 text (byte {e.start}). A recipe is a YAML file.") from e
    except yaml.YAMLError as e:
        raise RecipeError(f"{path}: not valid YAML: {' '.join(str(e).split())}") from e
    except OSError as e:
        raise RecipeError(f"{path}: cannot be read: {e.strerror}") from e
    if not isinstance(raw, dict):
        found = "an empty file" if raw is None else f"a {type(raw).__name__}"
        raise RecipeError(f'{path}: a recipe is a mapping of keys ("name: …", "target: …"); found {found}.')
    given = set(_leaves(raw))
    changed = set()
    for word in sets:
        changed.add(_apply(raw, word))
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as e:
        raise RecipeError(f"{path}: " + "; ".join(_explain(err) for err in e.errors())) from e
    return recipe, _sources(recipe, given, changed)


class _Strict(yaml.SafeLoader):
    """YAML keeps the last of two equal keys in silence; here the second is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen and isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, f'the key "{key_node.value}" stands twice', key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _apply(raw: dict, word: str) -> str:
    name, sep, text = word.partition("=")
    if not sep or not name:
        raise RecipeError(f'--set {word}: write it as --set section.key=value, as in "--set train.epochs=2"')
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise RecipeError(f"--set {word}: the value is not valid YAML") from e
    *parents, last = name.split(".")
    here = raw
    for part in parents:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise RecipeError(f'--set {word}: "{part}" is a value, not a section')
    here[last] = value
    return name


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    out: dict[str, Any] = {}
    for name, value in tree.items():
        out |= _leaves(value, f"{prefix}.{name}" if prefix else str(name))
    return out


def fields(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every key of the schema, dotted, with its pydantic field."""
    out: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            out |= fields(field.annotation, f"{path}.")
        else:
            out[path] = field
    return out


def _sources(recipe: Recipe, given: set[str], changed: set[str]) -> dict[str, Value]:
    values = flat(recipe)
    out = {}
    for path, field in fields(Recipe).items():
        source = (
            "--set"
            if path in changed
            else "recipe"
            if any(g == path or g.startswith(path) for g in given)
            else "default"
        )
        out[path] = Value(values[path], source, field.description or "")
    return out


def flat(recipe: Recipe) -> dict[str, Any]:
    """The recipe as {"section.key": value}, lists and facts kept whole."""
    dump = recipe.model_dump(by_alias=True, mode="json")
    return {
        path: functools.reduce(lambda tree, name: tree[name], path.split("."), dump)
        for path in fields(Recipe)
    }


def units() -> dict[str, str]:
    return {path: (f.json_schema_extra or {}).get("unit", "") for path, f in fields(Recipe).items()}


def _explain(err: Any) -> str:
    where = ".".join(str(p) for p in err["loc"])
    if err["type"] == "extra_forbidden":
        valid = list(fields(Recipe)) + [name for name in Recipe.model_fields]
        siblings = [v for v in valid if v.rpartition(".")[0] == where.rpartition(".")[0]] or valid
        near = difflib.get_close_matches(where, siblings, n=1, cutoff=0.5) or difflib.get_close_matches(
            where, valid, n=1
        )
        hint = f'; did you mean "{near[0]}"?' if near else f"; valid here: {', '.join(siblings)}"
        return f'unknown key "{where}"{hint}'
    if err["type"] == "missing":
        return f'"{where}" is missing'
    message = re.sub(r"^Value error, ", "", err["msg"])
    return f'"{where}": {message} (found {err["input"]!r:.80})'
