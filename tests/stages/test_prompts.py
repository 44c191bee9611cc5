import json

import pytest

from eyas.errors import UsageError
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
    found, bad = prompts.read(PromptsSection())
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
    found, _ = prompts.read(section(path))
    assert (found[0].prompt_id, found[0].domain, found[0].turns) == ("x", "d", ("one", "two"))
    assert (found[1].system, found[1].turns) == ("s", ("u",))
    assert found[2].turns == ("question number 0",)


def test_broken_lines_are_quarantined_with_line_and_reason(tmp_path):
    path = lines(tmp_path, b"{broken", *MANY, b"", b'{"prompt": ""}', {"prompt": "Question  NUMBER 3"})
    found, bad = prompts.read(section(path))
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
    found, _ = prompts.read(section(lines(tmp_path, *MANY)))
    again, _ = prompts.read(
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
