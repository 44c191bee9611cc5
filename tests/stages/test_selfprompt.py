import json
import random

import pytest

from eyas.errors import UsageError
from eyas.generate import prompts, selfprompt
from eyas.generate.answering import Answered
from eyas.generate.selfprompt import Filter
from eyas.schema import PromptsSection
from tests.conftest import byte_tokenizer


def test_the_frame_is_what_stands_around_the_users_words():
    around = selfprompt.frame(byte_tokenizer())
    assert around.prefix == [1]  # <user>
    assert around.end == 2  # <assistant> begins where the user ends


@pytest.mark.parametrize(
    ("text", "ended", "reason"),
    [
        ("How do I bake bread at home without an oven?", True, None),
        ("How do I bake bread at home without", False, "unfinished"),
        ("Hello you", True, "short"),
        ("do it again " * 8, True, "loop"),
        ("", True, "short"),
    ],
)
def test_what_is_dropped(text, ended, reason):
    assert Filter().reason(text, ended) == reason


def test_near_duplicates_are_dropped_but_another_question_is_kept():
    judge = Filter()
    assert judge.reason("How do I bake good bread at home without an oven?", True) is None
    assert judge.reason("how do I bake good bread at home without an oven, please", True) == "near duplicate"
    assert judge.reason("How do I mend a bicycle tyre at home?", True) is None


def test_near_duplicates_are_those_that_comparing_with_every_turn_finds():
    chance = random.Random(3)
    words = [
        "how",
        "do",
        "i",
        "bake",
        "mend",
        "sell",
        "good",
        "old",
        "bread",
        "a",
        "bicycle",
        "at",
        "home",
        "today",
    ]
    judge, kept = Filter(), []
    for _ in range(400):
        said = [chance.choice(words) for _ in range(chance.randint(4, 9))]
        shingles = {" ".join(said[i : i + 3]) for i in range(len(said) - 2)}
        near = any(len(shingles & other) > 0.6 * len(shingles) for other in kept)
        reason = judge.reason(" ".join(said), True)
        assert (reason == "near duplicate") == near
        if reason is None:
            kept.append(shingles)
    assert 0 < len(kept) < 400


class Writer:
    """An engine that writes these turns, the last one cut off."""

    stop_ids = (3,)
    turns = (
        "How do I bake bread?",
        "how do I bake BREAD",
        "Hi",
        "Why is the sky blue today?",
        "What does this mean",
    )

    def write(self, prefix, names, max_tokens, stop_ids):
        assert set(stop_ids) == {3, 2} and prefix == [1] and len(set(names)) == len(names)
        tok = byte_tokenizer()
        ids = [tok(t, add_special_tokens=False)["input_ids"] for t in self.turns]
        return [Answered(prefix, [*i, 2], "stop", "") for i in ids[:-1]] + [
            Answered(prefix, ids[-1], "length", "")
        ]


def test_turns_are_written_filtered_counted_and_read_again(tmp_path):
    wanted = [tmp_path, 2, 5, 0.5, "fingerprint"]
    found, dropped = selfprompt.write(Writer(), byte_tokenizer(), *wanted)
    assert [p.turns[0] for p in found] == ["How do I bake bread?", "Why is the sky blue today?"]
    assert dropped == {"near duplicate": 1, "short": 1, "unfinished": 1}
    again, _ = selfprompt.write(None, byte_tokenizer(), *wanted)  # no engine: all is there already
    assert again == found


def test_a_target_that_repeats_itself_gives_fewer_after_its_tries(tmp_path):
    found, dropped = selfprompt.write(Writer(), byte_tokenizer(), tmp_path, 4, 5, 0.5, "f")
    assert len(found) == 2 and dropped["near duplicate"] == 1 + 3 * 3
    assert len(list(tmp_path.glob("self-*.jsonl"))) == 4


def test_eight_words_in_a_row_keep_a_prompt_out(tmp_path):
    guard = tmp_path / "eval.jsonl"
    guard.write_text(
        '{"prompt": "Name the seven tallest mountains of the southern half of Africa."}\n{"prompt": "Why is it?"}'
    )
    mine = tmp_path / "mine.jsonl"
    same = "Please name the seven tallest mountains of the southern part."
    lines = [
        {"prompt": same},
        {"prompt": "why is IT"},
        *({"prompt": f"Tell me about the number {i}."} for i in range(30)),
    ]
    mine.write_text("\n".join(map(json.dumps, lines)))
    found, bad, _ = prompts.read(
        PromptsSection(sources=[{"path": str(mine)}], held_out=0.5, keep_out=[str(guard)])
    )
    assert len(found) == 30
    assert [b.reason for b in bad] == ["overlaps eval.jsonl, which is kept out"] * 2
    with pytest.raises(UsageError, match="cannot read"):
        prompts.read(PromptsSection(sources=[{"path": str(mine)}], held_out=0.5, keep_out=["/no/such.jsonl"]))


@pytest.mark.parametrize("source", [{}, {"path": "a", "self": 3}, {"self": 0}])
def test_a_source_is_a_file_or_a_number(source):
    with pytest.raises(ValueError):
        PromptsSection(sources=[source])
