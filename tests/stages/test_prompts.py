import json

import pytest

from eyas.errors import SurroundingsError, UsageError
from eyas.generate import prompts
from eyas.schema import PromptsSection
from eyas.stores.conversations import spread


def section(path, **more):
    return PromptsSection(sources=[{"path": str(path)}], **{"held_out": 0.4} | more)


def lines(tmp_path, *values):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\n".join(v if isinstance(v, bytes) else json.dumps(v).encode() for v in values))
    return path


MANY = [{"prompt": f"question number {i}"} for i in range(40)]


def test_the_shipped_set_has_five_domains_and_four_hundred_prompts():
    found, bad, _ = prompts.read(PromptsSection())
    assert len(found) >= 400 and not bad
    assert {p.domain for p in found} == {"chat", "code", "maths", "extraction", "spanish"}
    assert 0.05 < sum(p.held_out for p in found) / len(found) < 0.15


def test_three_forms_of_a_line(tmp_path):
    path = lines(
        tmp_path,
        {"turns": ["one", "two"], "id": "x", "domain": "d"},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "a"},
            ]
        },
        *MANY,
    )
    found, _, _ = prompts.read(section(path))
    assert (found[0].prompt_id, found[0].domain, found[0].turns) == ("x", "d", ("one", "two"))
    assert (found[1].system, found[1].turns) == ("s", ("u",))
    assert found[2].turns == ("question number 0",)


def test_broken_lines_are_quarantined_with_line_and_reason(tmp_path):
    path = lines(tmp_path, b"{broken", *MANY, b"", b'{"prompt": ""}', {"prompt": "Question  NUMBER 3"})
    found, bad, _ = prompts.read(section(path))
    assert len(found) == 40
    assert [b.where for b in bad] == ["p.jsonl:1", "p.jsonl:43", "p.jsonl:44"]
    assert (
        "not JSON" in bad[0].reason and "non-empty" in bad[1].reason and "duplicate of p-5" in bad[2].reason
    )


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff\xfe",
        b"[1]",
        b"3",
        b'{"text": "x"}',
        b'{"turns": "x"}',
        b'{"turns": []}',
        b'{"messages": [1]}',
        b'{"prompt": "\\ud800"}',
        b"[" * 5000,
    ],
)
def test_a_file_of_broken_lines_is_refused(tmp_path, bad):
    with pytest.raises(UsageError, match=r"3 of 3 lines cannot be used; the first: p\.jsonl:1"):
        prompts.read(section(lines(tmp_path, bad, bad, bad)))


def test_the_side_of_a_prompt_does_not_depend_on_its_file_or_case(tmp_path):
    found, _, _ = prompts.read(section(lines(tmp_path, *MANY)))
    again, _, _ = prompts.read(
        section(lines(tmp_path, *[{"prompt": f"  Question NUMBER {i}"} for i in reversed(range(40))]))
    )
    sides = {prompts.normalised(p.turns[0]): p.held_out for p in found}
    assert sides == {prompts.normalised(p.turns[0]): p.held_out for p in again}
    assert len(set(sides.values())) == 2


def test_too_few_prompts_for_two_sides(tmp_path):
    with pytest.raises(UsageError, match="side at held_out"):
        prompts.read(section(lines(tmp_path, {"prompt": "only one"})))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        prompts.read(section(tmp_path / "none.jsonl"))


def test_a_limit_takes_from_each_domain_in_turn():
    items = ["a1", "a2", "a3", "b1", "c1", "c2"]
    assert spread(items, 4, lambda s: s[0]) == ["a1", "a2", "b1", "c1"]
    assert spread(items, None, lambda s: s[0]) == items


# ---- other sources ----


def of(*sources, **more):
    return PromptsSection(sources=list(sources), **{"held_out": 0.4} | more)


def test_parquet_and_a_dataset_in_other_peoples_words(tmp_path):
    """ShareGPT's from and value, instruction and input, question; empty columns are none."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = [
        {"conversations": [{"from": "system", "value": "be kind"}, {"from": "human", "value": f"hello {i}"}, {"from": "gpt", "value": "hi"}], "question": None}
        for i in range(20)
    ]  # fmt: skip
    table += [{"conversations": None, "question": f"how many times is {i} in a hundred"} for i in range(20)]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "t.parquet")
    found = prompts.read(of({"path": str(tmp_path / "t.parquet")})).prompts
    assert len(found) == 40 and found[0].turns == ("hello 0",) and found[0].system == "be kind"
    assert found[20].turns == ("how many times is 0 in a hundred",) and found[20].prompt_id == "t-21"
    folder = tmp_path / "set"
    folder.mkdir()
    made = datasets.Dataset.from_list([{"instruction": f"turn number {i} around", "input": "abc", "output": "x"} for i in range(30)])  # fmt: skip
    made.to_parquet(folder / "train.parquet")
    found = prompts.read(of({"dataset": str(folder), "limit": 25})).prompts
    assert len(found) == 25 and found[3].turns == ("turn number 3 around\n\nabc",)


def test_a_dataset_that_cannot_be_read_names_the_presets(tmp_path):
    with pytest.raises(UsageError, match=r"cannot be read.*ultrachat"):
        prompts.read(of({"dataset": str(tmp_path)}))


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SurroundingsError, match=r'pip install "eyas\[data\]"'):
        prompts.read(of({"dataset": "ultrachat"}))


def test_a_request_log_gives_the_longest_request_of_each_chat(tmp_path):
    """Bare, in the batch format's body, and as text in request; a chat that goes on stands once, whatever the order."""
    one = [{"role": "user", "content": "first question of the chat"}]
    two = [*one, {"role": "assistant", "content": "a"}, {"role": "user", "content": "and a second one"}]
    log = lines(
        tmp_path,
        {"model": "m", "messages": two},
        {"custom_id": "1", "body": {"model": "m", "messages": one}},
        *[{"request": json.dumps({"messages": [{"role": "user", "content": f"what about {i}"}]})} for i in range(20)],
        {"custom_id": "2", "url": "/v1/embeddings", "body": {"input": "x"}},
    )  # fmt: skip
    found, bad, _ = prompts.read(of({"log": str(log)}))
    assert len(found) == 21 and ("first question of the chat", "and a second one") in {p.turns for p in found}
    assert [b.reason for b in bad] == [
        'is no chat request: it has no "messages", bare or in "body" or "request"'
    ]


def test_a_limit_is_shared_out_by_weight_and_what_one_lacks_goes_to_the_others(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"prompt": f"{name} asks for number {i}"}) for i in range(60)))  # fmt: skip
    found = prompts.read(of({"path": str(tmp_path / "a.jsonl"), "weight": 3}, {"path": str(tmp_path / "b.jsonl")}, limit=40))  # fmt: skip
    assert found.about["sources"] == {"a": 30, "b": 10}
    assert prompts.shared_out([100, 100, 5], [1, 1, 10], 61) == [28, 28, 5]
    assert prompts.shared_out([3, 4], [1, 1], None) == [3, 4]
    assert sum(prompts.shared_out([10, 0, 7, 50], [0.1, 5, 2, 1], 31)) == 31


def test_near_duplicates_are_left_out_and_named_but_a_quotation_is_none(tmp_path):
    long = "please write a short story about a small red fox who lives near an old mill and dreams of the sea each night"
    path = lines(
        tmp_path,
        {"prompt": long},
        {"prompt": long.replace("each", "every").upper() + "!"},
        {"prompt": "a small red fox"},
        {"prompt": "写一个关于小红狐狸的故事，它住在旧磨坊附近"},
        {"prompt": "写一个关于小红狐狸的故事，它住在旧磨坊附近。"},
        *MANY,
    )
    _, bad, about = prompts.read(section(path))
    assert [(b.where, b.reason) for b in bad] == [
        ("p.jsonl:2", "near duplicate of p-1"),
        ("p.jsonl:5", "near duplicate of p-4"),
    ]
    assert about["left_out"] == {"near duplicate": 2} and about["scripts"] == {"Latin": 42, "Han": 1}


def test_evaluation_prompts_are_kept_out_and_compared_by_script_and_domain(tmp_path):
    evaluation = tmp_path / "eval.jsonl"
    evaluation.write_text(
        json.dumps({"prompt": "how far is it from the earth to the moon in miles", "domain": "facts"})
        + "\n"
        + json.dumps({"prompt": "月までの距離は何キロメートルですか", "domain": "facts"})
    )
    path = lines(tmp_path, {"prompt": "tell me how far is it from the earth to the moon please"}, *MANY)
    found, _, about = prompts.read(section(path, keep_out=[str(evaluation)]))
    assert len(found) == 40 and about["left_out"] == {"overlaps eval.jsonl": 1}
    assert about["evaluation"] == {"domains": {"facts": 2}, "scripts": {"Latin": 1, "Kana": 1}}


@pytest.mark.parametrize(
    "value, said",
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "other than text"),
        ({"messages": [{"role": "user", "content": 3}]}, "is not text"),
        ({"prompt": "x", "tools": "[not json"}, '"tools" is not JSON'),
        ({"prompt": "x", "tools": [3]}, '"tools" is not a list'),
        ({"messages": [{"role": "system", "content": "only"}]}, "non-empty text"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_left_out_with_its_reason(tmp_path, value, said):
    _, bad, _ = prompts.read(section(lines(tmp_path, value, *MANY)))
    assert len(bad) == 1 and said in bad[0].reason


def test_parts_of_text_are_joined_and_tools_in_either_form_are_kept(tmp_path):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    path = lines(
        tmp_path,
        {"messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}], "tools": [{"name": "f", "parameters": {}}]},
        *MANY,
    )  # fmt: skip
    found = prompts.read(section(path)).prompts[0]
    assert (found.turns, found.role, found.system) == (("one two",), "developer", "d")
    assert json.loads(found.tools) == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize(
    "source", [{}, {"path": "a", "log": "b"}, {"path": "a", "split": "train"}, {"path": "a", "weight": 0}]
)
def test_a_source_is_one_thing(source):
    with pytest.raises(ValueError):
        of(source)
