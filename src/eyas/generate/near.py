"""Near duplicates among texts: those that share most of their runs of three words with one earlier text."""

import heapq
import re
import zlib
from collections import Counter

RUN = 3  # words; of scripts without spaces, characters
FEW = 8  # runs of a text that are remembered
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


def words(text: str) -> list[str]:
    """In lower case, without punctuation; each Han, Kana or Hangul character is one."""
    return WORD.findall(" ".join(text.casefold().split()))


class Near:
    """Texts that were kept, by name. same_share: of a text's runs that an earlier one has, above which it is a duplicate.

    both: the earlier one's share is looked at too, so that a short text is none of a long one that quotes it. Texts so alike have most of their
    few smallest hashes in common, as good as always: only those are remembered. Otherwise a text that has more than the share of these runs
    lacks fewer than the rest, so it has one of any that many: those with one of the rarest are compared."""

    def __init__(self, same_share: float, both: bool = True) -> None:
        self.same_share, self.both = same_share, both
        self.seen: dict[str, list[int]] = {}  # run -> the kept texts that have it
        self.kept: list[tuple[str, str]] = []

    def of(self, text: str) -> list[str]:
        """A text's runs, in order; the whole text where it is shorter."""
        found = words(text)
        return [" ".join(found[i : i + RUN]) for i in range(max(1, len(found) - RUN + 1))]

    def resembles(self, text: str) -> str | None:
        """The name of the kept text that is nearly this one, or None."""
        distinct = set(self.of(text))
        telling = self._telling(distinct)
        shared = Counter(i for s in telling for i in self.seen.get(s, ()))
        least = len(telling) / 2 if self.both else 1
        near = sorted(i for i, n in shared.items() if n >= least)
        return next((self.kept[i][0] for i in near if self._same(distinct, i)), None)

    def _telling(self, distinct: set[str]) -> list[str]:
        if self.both:
            return heapq.nsmallest(FEW, distinct, key=lambda s: zlib.crc32(s.encode()))
        rarest = sorted(distinct, key=lambda s: (len(self.seen.get(s, ())), s))
        return rarest[: int((1 - self.same_share) * len(distinct)) + 1]

    def _same(self, mine: set[str], other: int) -> bool:
        theirs = set(self.of(self.kept[other][1]))
        most = max(len(mine), len(theirs)) if self.both else len(mine)
        return len(mine & theirs) > self.same_share * most

    def keep(self, name: str, text: str) -> None:
        distinct = set(self.of(text))
        for s in self._telling(distinct) if self.both else distinct:
            self.seen.setdefault(s, []).append(len(self.kept))
        self.kept.append((name, text))
