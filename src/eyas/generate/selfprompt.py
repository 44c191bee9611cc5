"""Self-prompting: the target writes user turns itself, from its own template's prefix.

A chat model that is given everything up to where the user's words begin writes what users say, as it was trained on them.
Turns that do not end, that are too short, that loop, or that repeat an earlier one are dropped and counted.

    conversations/self-00000.jsonl …     one batch each: {"text", "ended"}
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from eyas import interrupt
from eyas.errors import UsageError
from eyas.generate.answering import Answering
from eyas.generate.near import Near, words
from eyas.generate.prompts import Prompt, is_held_out
from eyas.progress import Progress, say
from eyas.rundir import fingerprint, write_text

MARK = "\u2603user\u2603"
MAX_TOKENS = 96
MIN_WORDS = 3
SAME_SHARE = 0.6  # of a turn's runs already in one earlier turn
LOOP_SHARE = 0.5  # distinct runs of three words over all, below which a turn loops
TRIES = 4  # times the wanted number, then it gives up


class Frame(NamedTuple):
    """The template around a user's words: ids before them, and the first id after them."""

    prefix: list[int]
    end: int


def frame(tokenizer: Any) -> Frame:
    """Raises UsageError when the template does not show the user's words as they are."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], add_generation_prompt=True, tokenize=False
    )
    before, found, after = text.partition(MARK)
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    if not found or not ids:
        raise UsageError(
            "prompts: the chat template hides where a user's words begin or end; self-prompting cannot work."
        )
    return Frame(tokenizer(before, add_special_tokens=False)["input_ids"], ids[0])


class Filter:
    """Decides turn by turn, remembering what was kept."""

    def __init__(self) -> None:
        self.near = Near(SAME_SHARE, both=False)

    def reason(self, text: str, ended: bool) -> str | None:
        """Why a turn is dropped, or None when it is kept."""
        if not ended:
            return "unfinished"
        if len(words(text)) < MIN_WORDS:
            return "short"
        runs = self.near.of(text)
        if len(set(runs)) < LOOP_SHARE * len(runs):
            return "loop"
        if self.near.resembles(text) is not None:
            return "near duplicate"
        self.near.keep("", text)
        return None


def write(
    engine: Answering, tokenizer: Any, folder: Path, count: int, batch: int, held_out: float, target: str
) -> tuple[list[Prompt], dict[str, int]]:
    """`count` user turns as prompts, and how many were dropped for which reason. Resumes after the last batch."""
    around = frame(tokenizer)
    judge, dropped = Filter(), Counter[str]()
    prompts: list[Prompt] = []
    with Progress("self-prompts", count, "turns", "turns") as progress:
        for number in range(-(-TRIES * count // batch)):
            interrupt.safe_place()
            path = folder / f"self-{number:05d}.jsonl"
            if not path.is_file():
                write_text(path, _batch(engine, tokenizer, around, number, batch, target))
            before = len(prompts)
            for line in path.read_text(encoding="utf-8").splitlines():
                turn = json.loads(line)
                reason = judge.reason(turn["text"], turn["ended"])
                if reason:
                    dropped[reason] += 1
                elif len(prompts) < count:
                    side = is_held_out(turn["text"], held_out)
                    name = f"self-{len(prompts)}"
                    prompts.append(Prompt(name, "self", (turn["text"],), None, side, source="self"))
            progress.add(len(prompts) - before)
            if len(prompts) == count:
                break
    lost = ", ".join(f"{n} {reason}" for reason, n in dropped.items()) or "none"
    say(f"  self-prompts: {len(prompts):,} kept; dropped: {lost}")
    return prompts, dict(dropped)


def _batch(engine: Answering, tokenizer: Any, around: Frame, number: int, batch: int, target: str) -> str:
    names = [fingerprint(["self", target, number, i]) for i in range(batch)]
    answers = engine.write(around.prefix, names, MAX_TOKENS, (*engine.stop_ids, around.end))
    lines = []
    for answer in answers:
        ended = answer.finish_reason == "stop"
        ids = answer.ids[:-1] if ended else answer.ids
        text = tokenizer.decode(ids, skip_special_tokens=True).strip()
        lines.append(json.dumps({"text": text, "ended": ended}) + "\n")
    return "".join(lines)
