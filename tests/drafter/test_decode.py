"""Speculative decoding gives the target's own output: token for token when greedy, in distribution when sampled."""

from collections import Counter

import pytest
import torch

from eyas import target as targets
from eyas.contract import Norms, for_target
from eyas.drafter import replay
from eyas.drafter.decode import DraftSession, decode
from eyas.drafter.network import Drafter
from eyas.engines.hf import HFEngine
from eyas.stores.states import RowStates
from tests.conftest import END, drafter, random_row, save_target
from tests.drafter.reference import Reference

NORMS = Norms(before_residual=False, fc="chunks", output=False)


def make_engine(folder) -> HFEngine:
    return HFEngine(targets.load(folder), "float32", "cpu", [0, 1, 2])


def make_drafter(engine, seed=0, norms=NORMS) -> Drafter:
    """Untrained, full vocabulary, so that drafts are sometimes right on a small vocabulary."""
    t = engine.target
    made = Drafter(for_target(t, [0, 1, 2], norms, t.vocab, 3, 32))
    made.reset(seed, torch.arange(t.vocab), t.head_VD(), t.final_norm_D())
    return made.eval()


@pytest.fixture(scope="module")
def engine(target_folder):
    return make_engine(target_folder)


def plain(engine, prompt, n):
    """transformers' own greedy answer."""
    ids = torch.tensor([prompt])
    out = engine.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=n,
        do_sample=False,
        eos_token_id=END,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def prompts(engine, count=6):
    g = torch.Generator().manual_seed(5)
    return [torch.randint(4, engine.target.vocab, (5 + i,), generator=g).tolist() for i in range(count)]


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5, 8])
def test_greedy_output_is_the_targets_token_for_token(engine, k):
    made = make_drafter(engine)
    for prompt in prompts(engine):
        got = decode(engine, made, engine.target.embedding_VD(), prompt, k, 24)
        assert got.ids == plain(engine, prompt, 24)
        assert got.steps + sum(got.accepted_at) >= len(got.ids) - 1


@pytest.mark.parametrize("norms", [Norms(True, "whole", False), Norms(False, "none", True)], ids=str)
def test_drafts_equal_the_reference_after_every_refusal(norms):
    """The incremental cache, step after step, drafts what the definition drafts from the same true states."""
    made = drafter(seed=4, norms=norms)
    embedding = torch.randn(40, 16, generator=torch.Generator().manual_seed(9))
    kept = made.kept_W
    row = random_row(24, 6, 11)
    expected = Reference(made, embedding, row).run(3, lambda logits: int(kept[logits.argmax()]))
    session = DraftSession(made, embedding, 64)
    ids = row.ids_T.tolist()
    at = 6
    with torch.inference_mode():
        session.read(ids[1:7], row.aux_TLD[:6])
        for jump in (1, 3, 2, 4, 1):
            assert session.draft(3) == [expected[at - 1, k][2] for k in range(3)]
            session.read(ids[at + 1 : at + 1 + jump], row.aux_TLD[at : at + jump])
            at += jump


def test_an_answer_stops_at_the_end_token_and_at_the_limit(engine):
    made = make_drafter(engine)
    for prompt in prompts(engine, 3):
        for n in (1, 2, 5):
            got = decode(engine, made, engine.target.embedding_VD(), prompt, 3, n)
            assert got.ids == plain(engine, prompt, n)
            assert got.finish_reason == ("stop" if got.ids[-1] == END else "length")
    engine.stop_ids = (plain(engine, prompts(engine)[0], 6)[3],)
    try:
        got = decode(engine, made, engine.target.embedding_VD(), prompts(engine)[0], 3, 24)
    finally:
        engine.stop_ids = engine.target.stop_ids
    assert got.finish_reason == "stop" and len(got.ids) <= 4


def test_served_acceptance_equals_the_replayed_walk(engine):
    """Same weights, same answers: the engine accepts what the replay says, step for step."""
    made = make_drafter(engine)
    with torch.no_grad():  # a drafter that is often right: it repeats the target's favourite tokens
        made.lm_head.weight.copy_(engine.target.head_VD())
    embedding = engine.target.embedding_VD()
    for k in (1, 3, 5):
        served, replayed = [], []
        for prompt in prompts(engine, 12):
            got = decode(engine, made, embedding, prompt, k, 40)
            seen = engine.states([prompt + got.ids])
            row = RowStates(
                "0",
                torch.tensor(prompt + got.ids),
                seen.aux_BTLD[0],
                seen.last_BTD[0],
                seen.top1_BT[0],
                len(prompt),
            )
            served.append((got.steps, tuple(got.accepted_at)))
            replayed += [
                (w.steps, w.accepted_at)
                for w in [replay.walk(replay.accepted_lengths(made, embedding, [row], k)[0], k)]
            ]
        assert served == replayed
    assert sum(sum(a) for _, a in served) > 0, "nothing was accepted, so the example shows nothing"


@pytest.mark.parametrize("k", [0, 1, 3])
def test_sampled_output_follows_the_targets_distribution(tmp_path_factory, k):
    """Second and third token of 1,500 answers over 16 tokens against the exact distribution; chi-square below the 99.99th
    percentile of 15 degrees of freedom (44.3), fixed beforehand."""
    folder = tmp_path_factory.mktemp("small")
    engine = make_engine(save_target(folder, vocab=16, seed=1, sharpness=1.5))
    engine.stop_ids = ()
    made = make_drafter(engine)
    prompt, count = [4, 9, 7, 5], 1500
    with torch.no_grad():
        first = engine.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        after = engine.model(torch.tensor([[*prompt, a] for a in range(16)])).logits[:, -1].softmax(-1)
        then = (
            engine.model(torch.tensor([[*prompt, a, b] for a in range(16) for b in range(16)]))
            .logits[:, -1]
            .softmax(-1)
        )
    second = first @ after
    third = ((first[:, None] * after).flatten()[:, None] * then).sum(0)
    answers = [
        decode(engine, made, engine.target.embedding_VD(), prompt, k, 3, 1.0, seed=i).ids
        for i in range(count)
    ]
    for place, expected in ((1, second), (2, third)):
        seen = Counter(a[place] for a in answers)
        chi = sum((seen[t] - count * p) ** 2 / (count * p) for t, p in enumerate(expected.tolist()))
        assert chi < 44.3, (place, chi)


def test_drafts_are_needed_for_k_above_zero(engine):
    with pytest.raises(ValueError, match="needs a drafter"):
        decode(engine, None, None, [5, 6], 2, 4)
