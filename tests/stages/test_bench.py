"""Figures of the bench by hand, and the decision."""

import pytest

from eyas.bench import measure
from eyas.bench.measure import Request
from eyas.causes import why_apart
from eyas.drafter.replay import Interval
from eyas.report import charts
from eyas.schema import VerdictSection
from eyas.verdict.contexts import Served, by_context
from eyas.verdict.stage import decide


def request(prompt, k, tokens, steps, accepted, seconds, round_=0):
    return Request(round_, prompt, "d", k, 5, list(range(tokens)), "length", steps, accepted, 0.1, seconds)


def test_speed_cost_and_acceptance_of_one_prompt():
    """Plain: 10 tokens after the first in 10 s. k=2: the same in 5 passes of 1.5 s, 5 of 10 drafts accepted."""
    rows = [request("a", 0, 11, 10, [], 10.0), request("a", 2, 11, 5, [4, 1], 7.5)]
    (cell,) = measure.cells(rows, 0.95)
    assert cell["S"] == pytest.approx({"value": 10 / 7.5, "low": 10 / 7.5, "high": 10 / 7.5})
    assert cell["C"]["value"] == pytest.approx(1.5)
    assert cell["C_decode"]["value"] == pytest.approx(1.5)  # one request at a time: the same
    assert cell["tau"]["value"] == pytest.approx(2.0)
    assert cell["p"] == pytest.approx([0.8, 0.2])
    assert cell["tokens_per_s"] == pytest.approx(10 / 7.5)
    assert cell["refused"] is None


def test_prompts_are_pooled_by_time_not_averaged_by_ratio():
    rows = [
        request("a", 0, 11, 10, [], 10.0), request("a", 1, 11, 10, [0], 20.0),
        request("b", 0, 101, 100, [], 100.0), request("b", 1, 101, 50, [50], 50.0),
    ]  # fmt: skip
    (cell,) = measure.cells(rows, 0.95)
    assert cell["S"]["value"] == pytest.approx(110 / 70)
    assert cell["S"]["low"] == pytest.approx(0.5) and cell["S"]["high"] == pytest.approx(2.0)


def test_an_answer_of_one_token_is_left_out():
    rows = [
        request("a", 0, 1, 0, [], 0.0), request("a", 1, 1, 0, [0], 0.0),
        request("b", 0, 3, 2, [], 2.0), request("b", 1, 3, 1, [1], 1.5),
    ]  # fmt: skip
    assert measure.cells(rows, 0.95)[0]["S"]["value"] == pytest.approx(2 / 1.5)


def test_a_speedup_above_tau_is_refused():
    assert "cannot be cheaper" in measure.refused(Interval(2.1, 1.9, 2.3), Interval(2.0, 1.9, 2.1))
    assert measure.refused(Interval(1.9, 1.8, 2.0), Interval(2.0, 1.9, 2.1)) is None


def test_each_k_comes_first_in_turn():
    assert [measure.order([0, 1, 2], i) for i in range(4)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]


def bench(*cells):
    loads = sorted({c["concurrency"] for c in cells})
    return {"engine": "hf", "concurrency": loads, "dtype": "float32", "device": "cpu", "cells": list(cells)}


def cell(k, s, c, tau, replayed=None, refused=None, fault=0, load=1, p=None, p_replayed=None):
    def spot(v, spread=0.02):
        return {"value": v, "low": v - spread, "high": v + spread}

    return {
        "k": k, "concurrency": load, "p": p, "p_replayed": p_replayed, "S": spot(s), "C": spot(c), "tau": spot(tau), "tau_replayed": replayed or tau, "refused": refused,
        "outputs": {"equal": 5, "near_tie": 0, "fault": fault},
    }  # fmt: skip


FACTS = {"supervised_tokens": 1000, "parent": None, "contexts": [], "served": Served(0, 0)}


def test_it_ships_the_k_whose_interval_is_highest():
    v = decide(bench(cell(1, 1.2, 1.2, 1.44), cell(3, 1.5, 1.4, 2.1)), VerdictSection(), FACTS)
    assert v["ship"] and v["k"] == 3 and v["sentence"].startswith("YES")
    assert v["cells"][1]["S_predicted"] == pytest.approx(1.5)
    assert any("agree, so the engine runs what was trained" in r for r in v["reasons"])


def test_the_lower_end_decides():
    v = decide(bench(cell(1, 1.06, 1.2, 1.27)), VerdictSection(min_speedup=1.05), FACTS)
    assert not v["ship"] and v["k"] is None and v["best_k"] == 1
    assert any("interval is too wide" in r for r in v["reasons"])


def test_a_no_names_what_it_would_need():
    v = decide(bench(cell(1, 0.85, 1.2, 1.02)), VerdictSection(), FACTS)
    assert v["sentence"].startswith("NO") and any("needs 1.26 tokens a step" in r for r in v["reasons"])


def test_served_below_replayed_is_said():
    v = decide(bench(cell(1, 0.9, 1.2, 1.08, replayed=1.6)), VerdictSection(), FACTS)
    assert any("DISAGREE" in r for r in v["reasons"]) and any("NOT within" in r for r in v["reasons"])


def test_it_pays_at_low_load_and_not_at_high():
    """k=3 at 1, k=1 at 4, nothing at 8: each range with its best k, and why."""
    cells = [
        cell(1, 1.2, 1.2, 1.44), cell(3, 1.5, 1.4, 2.1),
        cell(1, 1.15, 1.25, 1.44, load=4), cell(3, 1.1, 1.9, 2.1, load=4),
        cell(1, 0.95, 1.5, 1.43, load=8), cell(3, 0.8, 2.6, 2.1, load=8),
    ]  # fmt: skip
    v = decide(bench(*cells), VerdictSection(), FACTS)
    assert v["ship"] and v["k"] == 3 and v["load"] == 1
    assert [(f["concurrency"], f["k"], f["ship"]) for f in v["loads"]] == [
        (1, 3, True),
        (4, 1, True),
        (8, 1, False),
    ]
    for words in (
        "at concurrency 1 with k=3: 1.50x",
        "at concurrency 4 with k=1: 1.15x",
        "not at 8 (best 0.95x",
    ):
        assert words in v["sentence"]
    assert any("1.40 at 1, 1.25 at 4, 1.50 at 8" in r for r in v["reasons"])


def test_loads_with_the_same_answer_are_one_range():
    cells = [cell(2, 1.5, 1.4, 2.1, load=b) for b in (1, 4)] + [cell(2, 0.9, 2.3, 2.1, load=8)]
    assert (
        "at concurrency 1 to 4 with k=2: 1.50x" in decide(bench(*cells), VerdictSection(), FACTS)["sentence"]
    )
    cells = [cell(2, 0.9, 2.3, 2.1, load=b) for b in (1, 4)]
    v = decide(bench(*cells), VerdictSection(), FACTS)
    assert (
        not v["ship"] and v["sentence"].startswith("NO: do not ship") and "at concurrency 1" in v["sentence"]
    )


@pytest.mark.parametrize(
    ("served", "outputs", "words"),
    [
        ([0.2, 0.1, 0.05], {"equal": 5, "fault": 0}, "loads or feeds the drafter otherwise"),
        ([0.62, 0.2, 0.05], {"equal": 5, "fault": 0}, "what is fed back differs"),
        ([0.75, 0.5, 0.35], {"equal": 5, "fault": 0}, "accepts more than the replay"),
        ([0.59, 0.38, 0.23], {"equal": 5, "fault": 0}, "numerics of another precision"),
        ([0.3, 0.1, 0.05], {"equal": 1, "fault": 4}, "another target, template or precision"),
    ],
)
def test_the_cause_is_named_where_served_and_replayed_differ(served, outputs, words):
    replayed = [0.63, 0.41, 0.25]
    assert words in why_apart(served, replayed, outputs)
    apart = cell(3, 0.9, 1.2, 1 + sum(served), replayed=1 + sum(replayed), p=served, p_replayed=replayed)
    apart["outputs"] |= outputs
    reasons = decide(bench(apart), VerdictSection(), FACTS)["reasons"]
    assert any(words in r for r in reasons) or abs(sum(served) - sum(replayed)) / (1 + sum(replayed)) < 0.03


def test_other_output_is_said():
    v = decide(bench(cell(1, 1.5, 1.2, 1.8, fault=2)), VerdictSection(), FACTS)
    assert any("2 greedy answers differ" in r for r in v["reasons"])


def test_without_a_valid_measurement_it_is_no():
    v = decide(bench(cell(1, 2.5, 0.8, 2.0, refused="broken")), VerdictSection(), FACTS)
    assert not v["ship"] and "no valid measurement" in v["sentence"]
    assert not decide(bench(), VerdictSection(), FACTS)["ship"]


@pytest.mark.parametrize(
    ("parent", "said"),
    [
        (
            {"k": 3, "tau": 2.1, "best_epoch": 0, "gain": {"value": 0, "low": 0, "high": 0}},
            "added nothing to the 2.100",
        ),
        (
            {"k": 3, "tau": 2.1, "best_epoch": 2, "gain": {"value": 0.1, "low": -0.1, "high": 0.3}},
            "may be chance",
        ),
        (
            {"k": 3, "tau": 2.1, "best_epoch": 2, "gain": {"value": 0.1, "low": 0.05, "high": 0.15}},
            "+0.100 [+0.050",
        ),
    ],
)
def test_the_verdict_says_what_finetuning_added(parent, said):
    (line,) = [
        r
        for r in decide(bench(cell(1, 1.5, 1.2, 1.8)), VerdictSection(), FACTS | {"parent": parent})[
            "reasons"
        ]
        if "finetuning" in r
    ]
    assert said in line


def test_a_step_beside_another_request_s_prompt_is_left_out_of_the_cost_of_decoding():
    """Two requests at once: the second one's prompt is read from 1.0 to 1.5, in the middle of the first one's third step."""

    def one(began, first, gaps):
        times = tuple(first + sum(gaps[:i]) for i in range(len(gaps) + 1))
        return measure.Request(
            0, "p", "d", 0, 3, [1] * len(times), "stop", len(gaps), [], first, sum(gaps), 2, began, times
        )

    a, b = one(0.0, 0.5, [0.2, 0.2, 0.7, 0.2]), one(1.0, 0.5, [0.2, 0.2])
    found = measure.undisturbed([a, b])
    assert found[0] == (pytest.approx(0.6), pytest.approx(3.0))  # of its four steps, all but the third
    assert found[1] == (pytest.approx(0.4), pytest.approx(2.0))  # its own wait does not count against it
    assert measure.undisturbed([a])[0] == (pytest.approx(1.3), pytest.approx(4.0))


def ranges(*found):
    """(from, speed, cost, acceptance) of prompts in each range."""

    def spot(v):
        return {"value": v, "low": v - 0.02, "high": v + 0.02}

    return [
        {"from": a, "below": 2 * a or 256, "prompts": 5, "S": spot(s), "C": spot(c), "tau": spot(t)}
        for a, s, c, t in found
    ]


def replayed(*found):
    return [
        {"from": a, "below": 2 * a or 256, "conversations": 9, "steps": 90, "tau": {"1": t - 0.2, "3": t}}
        for a, t in found
    ]


def test_where_in_the_context_it_stops_paying():
    one = cell(3, 1.2, 1.25, 1.5) | {
        "contexts": ranges((0, 1.3, 1.2, 1.56), (256, 1.1, 1.25, 1.4), (512, 0.9, 1.3, 1.2))
    }
    facts = FACTS | {
        "contexts": replayed((0, 1.6), (256, 1.4), (512, 1.2), (1024, 1.1)),
        "served": Served(600, 8192),
    }
    v = decide(bench(one), VerdictSection(), facts)
    assert [(r["from"], r["S"] and r["S"]["value"], r["tau_replayed"]) for r in v["contexts"]] == [
        (0, 1.3, 1.6), (256, 1.1, 1.4), (512, 0.9, 1.2), (1024, None, 1.1),
    ]  # fmt: skip
    assert v["contexts"][3]["S_predicted"] == pytest.approx(1.1 / 1.3)  # at the cost of the nearest range
    said = "\n".join(v["reasons"])
    assert (
        "stops paying at 512 tokens of context (0.90x [0.88, 0.92] from 512 to 1,024; it pays below that)"
        in said
    )
    assert "1.20 tokens a step where 1.30 break even (1.56 and 1.20 from 0 to 256)" in said
    assert "foretold for longer contexts" in said and "0.85x from 1,024 to 2,048" in said
    assert (
        "nothing is known beyond 2,048 tokens of context: the target takes 8,192, it was trained on rows of at most 600"
        in said
    )


def test_a_slower_range_between_paying_ones_is_not_the_end():
    one = cell(3, 1.2, 1.25, 1.5) | {
        "contexts": ranges((0, 1.3, 1.2, 1.56), (256, 0.95, 1.3, 1.2), (512, 1.1, 1.3, 1.43))
    }
    assert not any("stops paying" in r for r in decide(bench(one), VerdictSection(), FACTS)["reasons"])


def test_one_range_needs_no_curve_and_no_drafter_behind_it():
    one = cell(3, 1.2, 1.25, 1.5) | {"contexts": ranges((0, 0.9, 1.2, 1.08))}
    v = decide(bench(one), VerdictSection(), None)
    assert len(v["contexts"]) == 1 and not any("context" in r for r in v["reasons"])


def test_prompts_fall_in_the_range_of_the_middle_of_their_answer():
    """Ten prompts of 5 tokens with 11 or 601 more: medians 10 and 305; a single one of 1,201 has no range of its own."""
    rows = []
    for i, tokens in enumerate([11] * 5 + [601] * 5 + [1201]):
        plain, fast = (
            request(str(i), k, tokens, tokens - 1, [0][:k], s * (tokens - 1)) for k, s in ((0, 1.0), (1, 2.0))
        )
        rows += [plain, fast]
    found = measure.cells(rows, 0.95)[0]["contexts"]
    assert [(c["from"], c["below"], c["prompts"]) for c in found] == [(0, 256, 5), (256, 512, 5)]
    assert [c["S"]["value"] for c in found] == pytest.approx([0.5, 0.5])


def test_the_curve_over_contexts_shows_what_breaks_even_and_how_far_training_went():
    rows = by_context(
        {"k": 3, "contexts": ranges((0, 1.3, 1.2, 1.56), (256, 0.9, 1.3, 1.2))},
        replayed((0, 1.6), (256, 1.3), (512, 1.2)),
    )
    drawn = charts.contexts(rows, 300)
    assert all(text in drawn for text in ("breaks even", "replayed", "measured", "trained to 300", "512 to"))
    assert "trained to" not in charts.contexts(rows[:2], 300)
