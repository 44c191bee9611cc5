"""Prompts: read from JSONL, cleaned, split by a hash, spread over domains.

A line is {"turns": [...]}, {"messages": [{"role", "content"}, …]} or {"prompt": "…"}, with optional "id" and "domain".
Of messages, system and user are kept; assistant ones are dropped, since the target writes its own answers.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import UsageError
from eyas.recipe import SHIPPED
from eyas.schema import PromptsSection
from eyas.stores.conversations import spread

BUILTIN = SHIPPED / "assets" / "prompts.jsonl"
KEEP_OUT_WORDS = 8
BAD_SHARE = 0.1  # above this share of broken lines a file is refused: it is probably not what the user meant


@dataclass(frozen=True)
class Prompt:
    prompt_id: str
    domain: str
    turns: tuple[str, ...]
    system: str | None
    held_out: bool


@dataclass(frozen=True)
class Quarantined:
    """A line that is left out, and why."""

    where: str
    reason: str


class KeepOut:
    """Prompts that must not be trained on, by their runs of eight words (the whole prompt where it is shorter)."""

    def __init__(self) -> None:
        self.grams: dict[tuple[str, ...], str] = {}

    @classmethod
    def read(cls, paths: list[str]) -> "KeepOut":
        """Raises UsageError where a file cannot be read or holds a line that is no prompt."""
        made = cls()
        for path in map(Path, paths):
            for where, value in _lines(path):
                try:
                    turns = _prompt(value, where, 0.5).turns
                except ValueError as e:
                    raise UsageError(f"prompts.keep_out: {where}: {e}") from e
                for turn in turns:
                    made.grams |= dict.fromkeys(_grams(turn), path.name)
        return made

    def overlap(self, turns: tuple[str, ...]) -> str | None:
        """The file that a prompt shares eight words in a row with, or None."""
        return next((self.grams[g] for turn in turns for g in _grams(turn) if g in self.grams), None)


def _grams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", normalised(text))
    return {tuple(words[i : i + KEEP_OUT_WORDS]) for i in range(max(1, len(words) - KEEP_OUT_WORDS + 1))}


def source_path(path: str) -> Path:
    return BUILTIN if path == "builtin" else Path(path)


def normalised(text: str) -> str:
    return " ".join(text.casefold().split())


def prompt_key(first_turn: str) -> str:
    """16 hex digits that name a prompt in every run, by its first user turn."""
    return hashlib.sha256(normalised(first_turn).encode()).hexdigest()[:16]


def is_held_out(first_turn: str, share: float) -> bool:
    """Decided by the prompt alone, so that it is on one side in every run."""
    return int(prompt_key(first_turn), 16) / 2**64 < share


def read(section: PromptsSection) -> tuple[list[Prompt], list[Quarantined]]:
    """All distinct prompts of the recipe's sources, at most `limit`, and the lines left out.

    Raises UsageError where a source is missing, is mostly broken, or leaves no prompt on one side of the split.
    """
    prompts: dict[tuple, Prompt] = {}
    bad: list[Quarantined] = []
    guarded = KeepOut.read(section.keep_out)
    for source in section.sources:
        if source.path is None:
            continue  # written by the target: selfprompt.py
        path = source_path(source.path)
        lines = broken = 0
        for where, value in _lines(path):
            lines += 1
            try:
                prompt = _prompt(value, f"{path.stem}-{lines}", section.held_out)
            except ValueError as e:
                bad.append(Quarantined(where, str(e)))
                broken += 1
                continue
            identity = (prompt.system, *map(normalised, prompt.turns))
            overlap = guarded.overlap(prompt.turns)
            if overlap:
                bad.append(Quarantined(where, f"overlaps {overlap}, which is kept out"))
            elif identity in prompts:
                bad.append(Quarantined(where, f"duplicate of {prompts[identity].prompt_id}"))
            else:
                prompts[identity] = prompt
        if broken > BAD_SHARE * lines:
            raise UsageError(
                f"{path}: {broken} of {lines} lines cannot be used; the first: {bad[-broken].where}: {bad[-broken].reason}"
            )
    chosen = spread(list(prompts.values()), section.limit, lambda p: p.domain)
    if all(s.path for s in section.sources):
        need_both_sides(chosen, section.held_out)
    return chosen, bad


def need_both_sides(chosen: list[Prompt], share: float) -> None:
    """Raises UsageError where no prompt is on the training or none on the held-out side."""
    for side, name in ((True, "held-out"), (False, "training")):
        if not any(p.held_out is side for p in chosen):
            raise UsageError(
                f"prompts: none of the {len(chosen)} prompts is on the {name} side at held_out = {share}. "
                "Give more prompts, or change prompts.held_out."
            )


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        data = path.read_bytes()
    except OSError as e:
        raise UsageError(f"prompts.sources: cannot read {path}: {e.strerror}") from e
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path.name}:{number}"
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as e:
            yield where, e


def _prompt(value: Any, default_id: str, share: float) -> Prompt:
    """Raises ValueError saying what is wrong with a line."""
    if isinstance(value, Exception):
        raise ValueError(f"not JSON in UTF-8: {str(value)[:100]}")
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    system = None
    if "turns" in value:
        turns = value["turns"]
    elif "messages" in value:
        messages = value["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise ValueError('"messages" is not a list of {"role", "content"}')
        turns = [m.get("content") for m in messages if m["role"] == "user"]
        system = next((m.get("content") for m in messages if m["role"] == "system"), None)
        if system is not None and not isinstance(system, str):
            raise ValueError("the system message is not text")
    elif "prompt" in value:
        turns = [value["prompt"]]
    else:
        raise ValueError('needs "turns", "messages" or "prompt"')
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ValueError("user turns must be non-empty text")
    if any("\ud800" <= c <= "\udfff" for t in turns for c in t):
        raise ValueError("holds half a surrogate pair, which is not text")
    held = is_held_out(turns[0], share)
    return Prompt(
        str(value.get("id", default_id)), str(value.get("domain", "any")), tuple(turns), system, held
    )
