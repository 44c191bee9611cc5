"""What is true of rows and prompts, in numbers: finishes, ends of turn, lengths, scripts, languages, loops, refusals.

Each row is looked at once, as it is written or read back; what is kept of it is a few numbers.
"""

import functools
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

from eyas.stores.conversations import Row

LOOP_TOKENS, LOOP_RUN, LOOP_SHARE = (
    48,
    4,
    0.5,
)  # answers so long, with fewer distinct runs than this share, go round in circles
LETTERS = 300  # of a text, that tell its script
LANGUAGES, LANGUAGE_TEXT, SURE = (
    1000,
    1000,
    0.4,
)  # answers whose language is asked, characters of each, and the probability that counts
REFUSALS = (
    "i'm sorry, but i can", "i’m sorry, but i can", "i cannot assist", "i can't assist", "i can’t assist", "i cannot help with", "i can't help with",
    "i can’t help with", "i'm unable to", "i’m unable to", "i am unable to", "as an ai language model, i can", "i cannot provide", "i can't provide",
    "i’m not able to", "i'm not able to", "i cannot fulfill", "i can't fulfill", "我无法", "抱歉，我", "很抱歉", "申し訳ありませんが",
)  # fmt: skip
PERCENTILES = (5, 25, 50, 75, 95, 100)
SCRIPTS = {
    "CJK": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana", "HANGUL": "Hangul", "LATIN": "Latin", "CYRILLIC": "Cyrillic", "ARABIC": "Arabic",
    "DEVANAGARI": "Devanagari", "GREEK": "Greek", "HEBREW": "Hebrew", "THAI": "Thai", "BENGALI": "Bengali", "TAMIL": "Tamil",
}  # fmt: skip


def script(text: str) -> str:
    """The script of most of a text's first letters; Kana anywhere in Han text says Japanese, so Kana wins over Han."""
    letters = list(islice((c for c in text if c.isalpha()), LETTERS))
    found: Counter[str] = Counter()
    for c in letters:
        found["Latin" if c.isascii() else SCRIPTS.get(unicodedata.name(c, "?").split()[0], "other")] += 1
    if not found:
        return "none"
    if found["Kana"] and found["Kana"] + found["Han"] > len(letters) / 2:
        return "Kana"
    return found.most_common(1)[0][0]


@functools.cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # a second to load

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def language(text: str) -> str:
    """Its ISO 639-1 code, or "unsure" where that is no more than a guess: short answers, code, figures."""
    name, share = _identifier().classify(text[:LANGUAGE_TEXT])
    return str(name) if share >= SURE else "unsure"


def loops(ids: list[int]) -> bool:
    """Whether an answer repeats itself: under half of its runs of four ids are distinct."""
    if len(ids) < LOOP_TOKENS:
        return False
    runs = set(zip(*(ids[i:] for i in range(LOOP_RUN)), strict=False))
    return len(runs) < LOOP_SHARE * (len(ids) - LOOP_RUN + 1)


def refuses(text: str) -> bool:
    """Whether an answer begins with the words of a refusal (English, Chinese, Japanese)."""
    return text[:200].casefold().lstrip().startswith(REFUSALS)


def percentiles(lengths: Iterable[int]) -> dict[str, int]:
    """{"5": …, "50": …, "100": …}, nearest rank."""
    ranked = sorted(lengths)
    return {str(p): ranked[max(0, -(-p * len(ranked) // 100) - 1)] for p in PERCENTILES} if ranked else {}


class Figures:
    """Counts over rows, one by one; body() is the manifest's part."""

    def __init__(self, stop_ids: Iterable[int]) -> None:
        self.stop_ids = set(stop_ids)
        self.counts: dict[str, Counter[str]] = {
            name: Counter() for name in ("rows", "domains", "finish", "tokens", "scripts", "flags", "sources")
        }
        self.otherwise = self.ends = self.looped = self.refused = self.thought = self.cut_thoughts = (
            self.calls
        ) = self.longest = 0
        self.languages: Counter[str] = Counter()
        self.lengths = {"prompt": array("i"), "completion": array("i")}

    def add(self, r: Row) -> None:
        if r.flag:
            self.counts["flags"][r.flag] += 1
            return
        c = self.counts
        c["rows"][r.split] += 1
        c["domains"][r.domain] += 1
        c["finish"][r.finish_reason] += 1
        c["sources"][r.source] += 1
        c["tokens"]["prompt"] += len(r.prompt_ids)
        c["tokens"][f"completion_{r.split}"] += len(r.completion_ids)
        c["scripts"][script(r.text or r.reasoning)] += 1
        if self.languages.total() < LANGUAGES:
            self.languages[language(r.text or r.reasoning)] += 1
        self.otherwise += r.otherwise
        self.ends += bool(self.stop_ids.intersection(r.completion_ids[-1:]))
        self.looped += loops(r.completion_ids)
        self.refused += refuses(r.text)
        self.thought += bool(r.reasoning)
        self.cut_thoughts += bool(r.reasoning) and not r.text and r.finish_reason == "length"
        self.calls += bool(r.calls)
        self.longest = max(self.longest, len(r.prompt_ids) + len(r.completion_ids))
        self.lengths["prompt"].append(len(r.prompt_ids))
        self.lengths["completion"].append(len(r.completion_ids))

    def body(self) -> dict[str, Any]:
        """Shares are of the rows that are trained on or held out; flagged rows are counted by themselves."""
        n = max(sum(self.counts["rows"].values()), 1)
        return {
            "rows": dict(self.counts["rows"]),
            "domains": dict(self.counts["domains"]),
            "finish": dict(self.counts["finish"]),
            "tokens": dict(self.counts["tokens"]),
            "longest_row": self.longest,
            "ids_from": dict(self.counts["sources"]),
            "read_otherwise": self.otherwise,
            "flagged": dict(self.counts["flags"]),
            "truth": {
                "truncated": self.counts["finish"]["length"] / n,
                "ends_of_turn": self.ends / n,
                "loops": self.looped / n,
                "refusals": self.refused / n,
                "thoughts": self.thought / n,
                "cut_while_thinking": self.cut_thoughts / n,
                "calls": self.calls / n,
                "scripts": dict(self.counts["scripts"].most_common()),
                "languages": dict(self.languages.most_common()),
                "lengths": {name: percentiles(values) for name, values in self.lengths.items()},
            },
        }
