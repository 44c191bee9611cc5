"""The recipe's keys: typed and frozen, each with its default, its unit and the reason for that default.

`eyas recipe show` prints them. What is read from a file, and how, is in recipe.py.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


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
    cost_ratios: dict[int, Annotated[float, Field(gt=0)]] = key(
        {}, "time of a step that drafts k over a plain step, by k, at the load that counts"
    )


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
    kv_lora_rank: int | None = key(None, "of latent attention, where the target has it", gt=0)
    q_lora_rank: int | None = key(None, "of latent attention", gt=0)
    qk_nope_head_dim: int | None = key(None, "of latent attention", gt=0)
    qk_rope_head_dim: int | None = key(None, "of latent attention", gt=0)
    v_head_dim: int | None = key(None, "of latent attention", gt=0)
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


Word = Annotated[str, Field(coerce_numbers_to_str=True)]  # KEY: 1 in YAML means "1"
OURS = {  # arguments of a server that eyas sets itself, and where to say it instead
    "--speculative-config": "bench.k and train set it; draft_tensor_parallel_size in it does nothing to an EAGLE drafter in vLLM 0.18 to 0.32",
    "--model": "target.model", "--dtype": "target.dtype", "--host": "eyas listens on loopback", "--port": "eyas serve --port",
    "--served-model-name": "name", "--disable-log-stats": "it takes away the counters that bench reads",
}  # fmt: skip
OURS |= dict.fromkeys(("-sc", "--spec-method", "--spec-model", "--spec-tokens"), OURS["--speculative-config"])


class EngineSection(Section):
    name: Literal["hf", "vllm"] = key("hf", "the embedded engine (transformers); needs no server")
    python: str | None = key(
        None,
        "Python of the engine's own environment; else EYAS_VLLM_PYTHON, `eyas engine setup`, PATH",
        min_length=1,
    )
    args: list[str] = key([], "added to the server's command line", "words")
    env: dict[str, Word] = key(
        {}, "added to the server's environment; never put a key here: it is written to the run"
    )
    url: str | None = key(
        None,
        "a running OpenAI-compatible server of the target, which generate asks instead of starting one (http://host:port)",
        pattern=r"^https?://[^/\s]+/?$",
    )
    command: list[str] = key([], "put before the server's command line, as a container runtime's is", "words")

    @field_validator("args")
    @classmethod
    def not_ours(cls, args: list[str]) -> list[str]:
        for word in args:
            name = word.partition("=")[0].partition(".")[0]
            name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
            if name in OURS:
                raise ValueError(f"{word} is set by eyas itself ({OURS[name]})")
        return args


class PromptSource(Section):
    """One place that prompts come from: path, dataset, log, or self."""

    path: str | None = key(
        None,
        "JSONL or Parquet with `messages`, `turns` or `prompt`; `builtin` is the shipped set",
        min_length=1,
    )
    dataset: str | None = key(
        None, "of Hugging Face (extra `data`): a hub name, a folder, or a preset", min_length=1
    )
    split: str | None = key(None, "of the dataset; its preset's, or train", min_length=1)
    log: str | None = key(None, "JSONL of requests in OpenAI's format, as servers log them", min_length=1)
    self_: int | None = Field(None, alias="self", description="user turns written by the target itself", ge=1)
    weight: float = key(1.0, "share of prompts.limit, in proportion to the other sources", "", gt=0)
    limit: int | None = key(None, "at most so many of this source, from its beginning", "prompts", ge=1)
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @model_validator(mode="after")
    def one(self) -> "PromptSource":
        given = [x for x in (self.path, self.dataset, self.log, self.self_) if x is not None]
        if len(given) != 1:
            raise ValueError(
                "a source is one of {path: FILE}, {dataset: NAME}, {log: FILE} and {self: NUMBER}"
            )
        if self.split and not self.dataset:
            raise ValueError("split belongs to a dataset")
        return self


class PromptsSection(Section):
    sources: list[PromptSource] = key(
        [PromptSource.model_validate({"path": "builtin"})], "430 prompts that ship with eyas", min_length=1
    )
    limit: int | None = key(
        None,
        "all that the sources hold; a limit is shared out by their weights, and spread evenly over the domains",
        "prompts",
        ge=1,
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
    concurrency: int = key(
        16, "rows decoded together, or requests at once; the rows of a part file follow it", "rows", ge=1
    )
    endpoints: list[str] = key(
        [], "servers of the target that are asked beside engine.url, the least busy first", "addresses"
    )
    template: dict[str, Any] = key(
        {}, "options of the chat template, sent as chat_template_kwargs: {enable_thinking: false}"
    )
    thinking: Literal["auto"] | bool = key(
        "auto", "whether answers must hold thoughts; auto asks the chat template"
    )
    retokenised: Literal["leave_out", "keep"] = key(
        "leave_out",
        "answers that a server gave as text alone, where their ids, tokenised again, are not as many as it counted",
    )
    tools: str | None = key(
        None, "FILE.py:FUNCTION(name, arguments) -> text, that answers calls which no prompt recorded"
    )
    answer_s: float = key(
        1800.0, "one answer from beginning to end; a server that is silent is pinged long before", "s", gt=0
    )

    @field_validator("endpoints")
    @classmethod
    def addresses(cls, value: list[str]) -> list[str]:
        for url in value:
            if not re.fullmatch(r"https?://[^/\s]+/?", url):
                raise ValueError(f'"{url}" is no address of a server: http://host:port, without a path')
        return value


class ExtractSection(Section):
    with_: Literal["auto", "generate", "pass"] = Field(
        "auto",
        alias="with",
        description="generate: states are kept in the pass that generates (vLLM); pass: a pass over the stored ids; auto: the first where it can be",
        json_schema_extra={"unit": ""},
    )
    dtype: Literal["bfloat16", "float32", "fp8"] = key(
        "bfloat16",
        "aux states; half the disk of float32, no loss seen; fp8 halves them again, a scale for each token and layer",
    )
    shard_bytes: int = key(268_435_456, "what a kill costs at most", "bytes", ge=1024)
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class NormsSection(Section):
    before_residual: bool = key(False, "what SGLang and SafeAILab drafters do; vLLM reads either")
    fc: Literal["none", "chunks", "whole"] = key(
        "chunks", "one RMSNorm per aux state before fc (EAGLE-3.1 fc_norm); whole = norm_before_fc"
    )
    output: bool = key(
        True,
        "norm(h) is fed back instead of h (EAGLE-3.1 norm_output): 0.11 more tau on SmolLM2 after three epochs",
    )
    qk: bool = key(
        False, "norms of queries and keys, as Qwen3's layer has; vLLM serves them, SGLang does not"
    )

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
    architecture: Literal["llama", "mla"] = key(
        "llama",
        "the drafter's layer, which every engine serves and which trains fastest; mla: latent attention in the target's widths, for targets that have it",
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
    optimizer: Literal["auto", "muon", "adamw"] = key(
        "auto",
        "Muon for the matrices between embedding and head, AdamW for the rest, where products in bfloat16 are native; else AdamW for all",
    )
    lr: float = key(0.001, "peak rate, after 5 % warm-up, cosine to 2 % of it", "", gt=0, lt=1)
    norms: NormsSection = NormsSection()
    seed: int = key(0, "initial weights and order of rows", "", ge=0)


class BenchSection(Section):
    k: list[int] = key(
        [1, 2, 3, 5], "drafted tokens per step; the best is chosen from these", "tokens", min_length=1
    )
    concurrency: list[int] = key(
        [1],
        "requests at once, each load measured by itself; the embedded engine serves one",
        "requests",
        min_length=1,
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

    lengths: Literal["natural", "fixed"] = key(
        "natural", "answers end where the target ends them; fixed: all have max_tokens (servers only)"
    )

    @field_validator("concurrency")
    @classmethod
    def loads(cls, value: list[int]) -> list[int]:
        if any(not 1 <= b <= 4096 for b in value) or len(set(value)) != len(value):
            raise ValueError("each is 1..4096, named once")
        return sorted(value)


class VerdictSection(Section):
    min_speedup: float = key(1.05, "below this a drafter is not worth its memory and its risk", "times", ge=1)
    traffic: Literal["any", "greedy"] = key(
        "any", "any: sampled answers must stay the target's too; greedy: you never send a temperature"
    )
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

    @model_validator(mode="after")
    def embedded(self) -> "Recipe":
        if self.engine.name == "hf":
            if self.bench.concurrency != [1]:
                raise ValueError(
                    '"bench.concurrency": the embedded engine decodes one request at a time: set it to [1], or engine.name to vllm'
                )
            if self.bench.lengths != "natural":
                raise ValueError('"bench.lengths": fixed needs a server: set engine.name to vllm')
            if self.generate.endpoints:
                raise ValueError('"generate.endpoints": servers are asked only with engine.name: vllm')
            if self.engine.url:
                raise ValueError('"engine.url": a server is asked only with engine.name: vllm')
            if self.extract.with_ == "generate":
                raise ValueError(
                    '"extract.with": only a server keeps states while it generates: set engine.name to vllm'
                )
        return self
