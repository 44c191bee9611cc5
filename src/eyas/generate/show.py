"""Rows as a person reads them, coloured by what is supervised: eyas generate RUN --show N."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.stores import conversations
from eyas.stores.conversations import Row, spread

DIM, SUPERVISED, PLAIN = "\x1b[2m", "\x1b[1;32m", "\x1b[0m"


def show(folder: Path, tokenizer: Any, count: int) -> None:
    """Print `count` rows, taken in turn from the domains. On a terminal what is supervised is green, elsewhere it stands in ⟦⟧."""
    rows = [r for path in conversations.parts(folder) for r in conversations.read_part(path)]
    for row in spread(rows, count, lambda r: r.domain):
        print("\n".join(lines(row, tokenizer, sys.stdout.isatty())))


def lines(row: Row, tokenizer: Any, coloured: bool) -> Iterator[str]:
    """A head, and the row with its special tokens; control characters that a model wrote are shown, not sent to the terminal."""
    left_out = f", left out: {row.flag}" if row.flag else ""
    yield (
        f"── {row.row_id} {row.domain} {row.split} turn {row.turn + 1}: {len(row.prompt_ids):,} prompt + {len(row.completion_ids):,} "
        f"supervised tokens, {row.finish_reason}{left_out}"
    )
    before, after = (
        harmless(tokenizer.decode(ids, skip_special_tokens=False))
        for ids in (row.prompt_ids, row.completion_ids)
    )
    yield f"{DIM}{before}{PLAIN}{SUPERVISED}{after}{PLAIN}" if coloured else f"{before}⟦{after}⟧"


def harmless(text: str) -> str:
    """Without control characters but line ends and tabs.

    >>> harmless("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
