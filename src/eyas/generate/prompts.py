"""Prompts: read from the recipe's sources, cleaned, mixed by weight, split by a hash, spread over domains.

A value is {"messages": [{"role", "content"}, …]}, {"turns": [...]} or {"prompt": "…"}, with optional "id", "domain" and "tools". Of messages,
system or developer and user are kept; assistant ones are dropped, since the target writes its own answers, but for their calls, whose
recorded results (role tool) answer the target where it calls the same.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eyas.errors import UsageError
from eyas.generate import near, sources
from eyas.generate.near import Near
from eyas.schema import PromptSource, PromptsSection
from eyas.stores import truth
from eyas.stores.conversations import spread

KEEP_OUT_WORDS = 8
BAD_SHARE = 0.1  # above this share of broken lines a file is refused: it is probably not what the user meant
NEAR_SHARE = 0.9  # of a prompt's runs of three words already in one earlier prompt
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function": "tool",
}  # as others call them


@dataclass(frozen=True)
class Prompt:
    prompt_id: str
    domain: str
    turns: tuple[str, ...]
    system: str | None
    held_out: bool
    role: str = "system"  # of the system message: system or developer
    tools: str = ""  # their definitions, JSON
    results: tuple[
        tuple[str, str, str], ...
    ] = ()  # recorded: function, canonical arguments, what it answered
    source: str = ""


@dataclass(frozen=True)
class Quarantined:
    """A line that is left out, and why."""

    where: str
    reason: str


class Mixture(NamedTuple):
    """The prompts of a run, what was left out, and how they compare with the evaluation prompts."""

    prompts: list[Prompt]
    left_out: list[Quarantined]
    about: dict[str, Any]  # left_out by kind; domains, scripts and sources of the prompts and of keep_out's


class KeepOut:
    """Prompts that must not be trained on, by their runs of eight words (the whole prompt where it is shorter)."""

    def __init__(self) -> None:
        self.grams: dict[tuple[str, ...], str] = {}
        self.domains, self.scripts = Counter[str](), Counter[str]()

    @classmethod
    def read(cls, paths: list[str]) -> "KeepOut":
        """Raises UsageError where a file cannot be read or holds a line that is no prompt."""
        made = cls()
        for path in map(Path, paths):
            for where, value in sources.lines(path):
                try:
                    prompt = read_one(value, where, 0.5)
                except ValueError as e:
                    raise UsageError(f"prompts.keep_out: {where}: {e}") from e
                made.domains[prompt.domain] += 1
                made.scripts[truth.script(prompt.turns[0])] += 1
                for turn in prompt.turns:
                    made.grams |= dict.fromkeys(_grams(turn), path.name)
        return made

    def overlap(self, turns: tuple[str, ...]) -> str | None:
        """The file that a prompt shares eight words in a row with, or None."""
        if not self.grams:
            return None
        return next((self.grams[g] for turn in turns for g in _grams(turn) if g in self.grams), None)


def _grams(text: str) -> set[tuple[str, ...]]:
    found = near.words(text)
    return {tuple(found[i : i + KEEP_OUT_WORDS]) for i in range(max(1, len(found) - KEEP_OUT_WORDS + 1))}


def normalised(text: str) -> str:
    return " ".join(text.casefold().split())


def canonical(arguments: Any) -> str:
    """Arguments of a call, whatever their order and spacing."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return str(arguments)
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def prompt_key(first_turn: str) -> str:
    """16 hex digits that name a prompt in every run, by its first user turn."""
    return hashlib.sha256(normalised(first_turn).encode()).hexdigest()[:16]


def is_held_out(first_turn: str, share: float) -> bool:
    """Decided by the prompt alone, so that it is on one side in every run."""
    return int(prompt_key(first_turn), 16) / 2**64 < share


class _Reader:
    """Takes prompts one by one, and leaves out what is broken, known, or kept out."""

    def __init__(self, section: PromptsSection) -> None:
        self.section, self.guarded = section, KeepOut.read(section.keep_out)
        self.exact: dict[tuple[Any, ...], str] = {}
        self.near = Near(NEAR_SHARE)
        self.bad: list[Quarantined] = []
        self.kinds: Counter[str] = Counter()

    def leave(self, where: str, kind: str, reason: str) -> None:
        self.bad.append(Quarantined(where, reason))
        self.kinds[kind] += 1

    def take(self, source: PromptSource) -> list[Prompt]:
        """A source's prompts. Raises UsageError where it is mostly broken."""
        name = sources.name_of(source)
        out: list[Prompt] = []
        number = 0
        broken: list[Quarantined] = []
        for where, value in sources.stream(source):
            number += 1
            try:
                prompt = read_one(value, f"{name}-{number}", self.section.held_out, name)
            except ValueError as e:
                self.leave(where, "broken", str(e))
                broken.append(self.bad[-1])
                continue
            if self._new(prompt, where):
                out.append(prompt)
            if source.limit and len(out) == source.limit:
                break
        if len(broken) > BAD_SHARE * number:
            raise UsageError(
                f"{source.path or source.log or source.dataset}: {len(broken)} of {number} lines cannot be used; the first: {broken[0].where}: {broken[0].reason}"
            )
        return out

    def _new(self, prompt: Prompt, where: str) -> bool:
        overlap = self.guarded.overlap(prompt.turns)
        identity = (prompt.system, prompt.tools, *map(normalised, prompt.turns))
        if overlap:
            self.leave(where, f"overlaps {overlap}", f"overlaps {overlap}, which is kept out")
            return False
        if identity in self.exact:
            self.leave(where, "duplicate", f"duplicate of {self.exact[identity]}")
            return False
        text = "\n".join((prompt.system or "", *prompt.turns))
        if (like := self.near.resembles(text)) is not None:
            self.leave(where, "near duplicate", f"near duplicate of {like}")
            return False
        self.exact[identity] = prompt.prompt_id
        self.near.keep(prompt.prompt_id, text)
        return True


def read(section: PromptsSection) -> Mixture:
    """All distinct prompts of the recipe's sources, at most `limit`, shared out by weight.

    Raises UsageError where a source is missing, is mostly broken, or leaves no prompt on one side of the split.
    """
    reader = _Reader(section)
    per_source = [  # those of {self: N} are written by the target: selfprompt.py
        reader.take(source) if source.self_ is None else [] for source in section.sources
    ]
    weights = [s.weight for s in section.sources]
    shares = shared_out([len(p) for p in per_source], weights, section.limit)
    chosen = [
        p
        for prompts, share in zip(per_source, shares, strict=True)
        for p in spread(prompts, share, lambda p: p.domain)
    ]
    if all(s.self_ is None for s in section.sources):
        need_both_sides(chosen, section.held_out)
    return Mixture(chosen, reader.bad, describe(chosen, reader.kinds, reader.guarded))


def shared_out(sizes: list[int], weights: list[float], limit: int | None) -> list[int]:
    """How many of each source: `limit` in proportion to the weights, what a source lacks going to the others.

    >>> shared_out([100, 100, 5], [2, 1, 1], 60)
    [37, 18, 5]
    """
    if limit is None or limit >= sum(sizes):
        return sizes
    out = [0] * len(sizes)
    open_ = [i for i, n in enumerate(sizes) if n]
    left = limit
    while open_ and left:
        total = sum(weights[i] for i in open_)
        full = [i for i in open_ if sizes[i] <= left * weights[i] / total]
        if full:
            for i in full:
                out[i] = sizes[i]
            left -= sum(sizes[i] for i in full)
            open_ = [i for i in open_ if i not in full]
            continue
        exact = {i: left * weights[i] / total for i in open_}
        for i in open_:
            out[i] = int(exact[i])
        for i in sorted(open_, key=lambda i: out[i] - exact[i])[: left - sum(out[i] for i in open_)]:
            out[i] += 1
        break
    return out


def describe(prompts: list[Prompt], kinds: Counter[str], guarded: KeepOut) -> dict[str, Any]:
    """What the prompts are, beside those that they will be judged by."""
    return {
        "left_out": dict(kinds),
        "sources": dict(Counter(p.source for p in prompts)),
        "domains": dict(Counter(p.domain for p in prompts)),
        "scripts": dict(Counter(truth.script(p.turns[0]) for p in prompts)),
        "evaluation": {"domains": dict(guarded.domains), "scripts": dict(guarded.scripts)},
    }


def need_both_sides(chosen: list[Prompt], share: float) -> None:
    """Raises UsageError where no prompt is on the training or none on the held-out side."""
    for side, name in ((True, "held-out"), (False, "training")):
        if not any(p.held_out is side for p in chosen):
            raise UsageError(
                f"prompts: none of the {len(chosen)} prompts is on the {name} side at held_out = {share}. "
                "Give more prompts, or change prompts.held_out."
            )


# ---- one value ----


def read_one(value: Any, default_id: str, share: float, source: str = "") -> Prompt:
    """Raises ValueError saying what is wrong with it."""
    if isinstance(value, Exception):
        said = str(value)
        raise ValueError(said if said.startswith("is no") else f"not JSON in UTF-8: {said[:100]}")
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    system, role = None, "system"
    results: tuple[tuple[str, str, str], ...] = ()
    if "turns" in value:
        turns = value["turns"]
    elif "messages" in value or isinstance(value.get("prompt"), list):
        messages = _messages(value.get("messages", value.get("prompt")))
        turns = [m["content"] for m in messages if m["role"] == "user"]
        first = next((m for m in messages if m["role"] in ("system", "developer")), None)
        if first:
            system, role = first["content"], first["role"]
        results = tuple(_results(messages))
    elif "prompt" in value:
        turns = [value["prompt"]]
    else:
        raise ValueError('needs "turns", "messages" or "prompt"')
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ValueError("user turns must be non-empty text")
    texts = [*turns, system or ""]
    if any("\ud800" <= c <= "\udfff" for t in texts for c in t):
        raise ValueError("holds half a surrogate pair, which is not text")
    return Prompt(
        str(value.get("id", default_id)), str(value.get("domain", "any")), tuple(turns), system, is_held_out(turns[0], share),
        role, _tools(value.get("tools")), results, source,
    )  # fmt: skip


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Messages in OpenAI's form; ShareGPT's from and value are read too."""
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and ("role" in m or "from" in m) for m in messages
    ):
        raise ValueError('"messages" is not a list of {"role", "content"}')
    out = []
    for m in messages:
        role = str(m.get("role", m.get("from")))
        content = _text(m.get("content", m.get("value")), role)
        out.append({**m, "role": ROLES.get(role, role), "content": content})
    return out


def _text(content: Any, role: str) -> str | None:
    """A message's words; parts of text are joined. Raises ValueError where there are others."""
    if isinstance(content, list):
        if not all(
            isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str)
            for p in content
        ):
            raise ValueError(f"a {role} message holds something other than text, which eyas cannot send")
        return "".join(p["text"] for p in content)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"the {role} message is not text")
    return content


def _results(messages: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Each call of an assistant with what its tool answered, found by the call's id."""
    answered = {m.get("tool_call_id"): m["content"] for m in messages if m["role"] == "tool"}
    for m in messages:
        calls = m.get("tool_calls") if m["role"] == "assistant" else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(answered.get(call.get("id")), str):
                yield (
                    str(function.get("name")),
                    canonical(function.get("arguments") or "{}"),
                    answered[call.get("id")],
                )


def _tools(value: Any) -> str:
    """Definitions of tools in OpenAI's form, as JSON; some data sets have them as text."""
    if not value:
        return ""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError as e:
        raise ValueError(f'"tools" is not JSON: {e}') from e
    if not isinstance(tools, list) or not all(
        isinstance(t, dict) and ("function" in t or "name" in t) for t in tools
    ):
        raise ValueError('"tools" is not a list of {"type": "function", "function": {…}}')
    whole = [t if "function" in t else {"type": "function", "function": t} for t in tools]
    return json.dumps(whole, ensure_ascii=False)
