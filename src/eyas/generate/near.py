"""Near duplicates among texts: those that share most of their runs of three words with one earlier text."""

import re

SHINGLE = 3  # words; of scripts without spaces, characters
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


def words(text: str) -> list[str]:
    """In lower case, without punctuation; each Han, Kana or Hangul character is one."""
    return WORD.findall(" ".join(text.casefold().split()))


class Near:
    """Texts that were kept, by name. same_share: of a text's runs that an earlier one has, above which it is a duplicate; both: the
    earlier one's share is looked at too, so that a short text is none of a long one that quotes it."""

    def __init__(self, same_share: float, both: bool = True) -> None:
        self.same_share, self.both = same_share, both
        self.seen: dict[str, list[int]] = {}  # shingle -> the kept texts that have it
        self.kept: list[tuple[str, set[str]]] = []

    def of(self, text: str) -> list[str]:
        """A text's shingles, in order; the whole text where it is shorter."""
        found = words(text)
        return [" ".join(found[i : i + SHINGLE]) for i in range(max(1, len(found) - SHINGLE + 1))]

    def resembles(self, distinct: set[str]) -> str | None:
        """The kept text that has more than the share of these shingles, or None. Such a text lacks fewer than the rest, so it has one of any
        that many: only those with one of the rarest are compared."""
        rarest = sorted(distinct, key=lambda s: (len(self.seen.get(s, ())), s))
        some = rarest[: int((1 - self.same_share) * len(distinct)) + 1]
        near = {i for s in some for i in self.seen.get(s, ())}
        return next((self.kept[i][0] for i in sorted(near) if self._same(distinct, self.kept[i][1])), None)

    def _same(self, mine: set[str], theirs: set[str]) -> bool:
        most = max(len(mine), len(theirs)) if self.both else len(mine)
        return len(mine & theirs) > self.same_share * most

    def keep(self, name: str, distinct: set[str]) -> None:
        for s in distinct:
            self.seen.setdefault(s, []).append(len(self.kept))
        self.kept.append((name, distinct))
