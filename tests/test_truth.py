"""stores/truth.py and generate/show.py by hand."""

import pytest

from eyas.generate import show
from eyas.stores import truth
from eyas.stores.conversations import Row, write_part
from tests.conftest import END, byte_tokenizer


@pytest.mark.parametrize(
    "text, name",
    [
        ("Guten Tag, 3 Äpfel", "Latin"), ("你好，世界", "Han"), ("これは本です", "Kana"), ("안녕하세요", "Hangul"), ("Привет мир", "Cyrillic"),
        ("مرحبا", "Arabic"), ("123 !?", "none"), ("", "none"), ("ab Привет мир", "Cyrillic"), ("ꦲꦤ", "other"),
    ],
)  # fmt: skip
def test_the_script_of_a_text(text, name):
    assert truth.script(text) == name


@pytest.mark.parametrize(
    "text, name",
    [
        ("The quick brown fox jumps over the lazy dog and runs home.", "en"), ("Der schnelle braune Fuchs springt über den faulen Hund.", "de"),
        ("El zorro marrón salta sobre el perro perezoso y vuelve a casa.", "es"), ("这是一本关于狐狸的书，它住在磨坊附近", "zh"), ("これは狐についての本です", "ja"),
        ("42", "unsure"), ("", "unsure"),
    ],
)  # fmt: skip
def test_the_language_of_a_text(text, name):
    assert truth.language(text) == name


def test_an_answer_that_goes_round_in_circles():
    assert truth.loops([1, 2, 3, 4, 5] * 12) and not truth.loops([1, 2, 3] * 5), "short ones are none"
    assert not truth.loops(list(range(60))) and not truth.loops([*range(40), *range(30)])


@pytest.mark.parametrize(
    "text, refused",
    [
        ("I'm sorry, but I can't help with that.", True), ("  I cannot assist with this", True), ("很抱歉，我无法回答", True),
        ("I'm sorry to hear that! Let us look at it.", False), ("You said: I cannot assist", False),
    ],
)  # fmt: skip
def test_a_refusal_is_told_by_its_first_words(text, refused):
    assert truth.refuses(text) is refused


def test_percentiles_are_lengths_that_occur():
    assert truth.percentiles(range(1, 101)) == {"5": 5, "25": 25, "50": 50, "75": 75, "95": 95, "100": 100}
    assert truth.percentiles([7]) == dict.fromkeys(("5", "25", "50", "75", "95", "100"), 7)
    assert truth.percentiles([]) == {}


def row(**changes):
    fields = dict(
        row_id="r", prompt_id="p", prompt_key="k", domain="d", split="train", turn=0, sample=0, prompt_ids=[5, 6], completion_ids=[7, END],
        finish_reason="stop", temperature=0.8, top_p=1.0, target="t", text="well",
    )  # fmt: skip
    return Row(**fields | changes)


def test_figures_of_four_rows_and_a_flagged_one():
    figures = truth.Figures([END])
    for r in (
        row(),
        row(text="", reasoning="so", completion_ids=[7, 8], finish_reason="length", split="held_out"),
        row(text="I cannot assist", calls="[]", domain="e"),
        row(completion_ids=[1, 2] * 40, finish_reason="length", otherwise=1),
        row(flag="its ids do not spell its text"),
    ):
        figures.add(r)
    body = figures.body()
    assert body["rows"] == {"train": 3, "held_out": 1} and body["flagged"] == {
        "its ids do not spell its text": 1
    }
    t = body["truth"]
    assert (t["truncated"], t["ends_of_turn"], t["loops"], t["refusals"]) == (0.5, 0.5, 0.25, 0.25)
    assert sum(t["languages"].values()) == 4
    assert (t["thoughts"], t["cut_while_thinking"], t["calls"]) == (0.25, 0.25, 0.25)
    assert (
        t["lengths"]["completion"]["100"] == 80 and body["read_otherwise"] == 1 and body["longest_row"] == 82
    )


def test_shown_rows_have_their_supervised_part_marked_and_no_control_characters(tmp_path, capsys):
    tokenizer = byte_tokenizer()
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    rows = [row(prompt_ids=ids("<user>hi\x1b[2J<assistant>"), completion_ids=[*ids("yes\n"), END], row_id=str(i)) for i in range(5)]  # fmt: skip
    write_part(tmp_path / "part-00000.parquet", rows)
    show.show(tmp_path, tokenizer, 2)
    out = capsys.readouterr().out
    assert out.count("⟦yes\n<end>⟧") == 2 and "\x1b" not in out and "<user>hi\\x1b[2J<assistant>" in out
    coloured = list(show.lines(rows[0], tokenizer, coloured=True))[1]
    assert coloured.endswith(f"{show.SUPERVISED}yes\n<end>{show.PLAIN}") and "⟦" not in coloured
