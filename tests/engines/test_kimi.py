"""Kimi-K2.5's stand-in in a real vLLM: what a drafter with latent attention gives there is what the replay says."""

import pytest
import torch

from eyas import pipeline
from eyas.bench import load
from eyas.bench.load import Ask, Load, Place
from eyas.contract import Norms, for_target
from eyas.drafter import replay
from eyas.engines import vllm
from eyas.engines.hf import HFEngine
from eyas.rundir import RunDir
from eyas.servers import serve
from eyas.stores.states import RowStates
from tests import skilled
from tests.conftest import write_recipe
from tests.kimi import standin

K, TOKENS = 3, 24


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    return standin(tmp_path_factory.mktemp("kimi") / "model", "--experts", "4", "--hidden", "64")


def test_a_drafter_with_latent_attention_serves_as_it_replays(kimi, prompt_file, tmp_path):
    target, rows = skilled.answers(kimi, count=8, tokens=TOKENS, layers=skilled.AUX)
    norms = Norms(True, "chunks", True)
    shape = for_target(target, skilled.AUX, norms, 200, skilled.STEPS, 64, "mla")
    kept = ("architecture", "latent", "kv_heads", "head_dim", "rope_scaling")
    made = skilled.drafter(target, rows, norms, **{name: getattr(shape, name) for name in kept})
    place = RunDir(tmp_path / "run")
    skilled.write(place / "drafter" / "best", made)
    path = write_recipe(tmp_path / "r.yaml", kimi, prompt_file)
    sets = (
        "engine.name=vllm", "target.trust_remote_code=true", f"target.aux_layers={skilled.AUX}",
        "engine.args=[--attention-backend, CPU_MLA, --language-model-only, --no-enable-prefix-caching]",
    )  # fmt: skip
    resolved, _, _ = pipeline.open_run(str(path), sets, str(tmp_path / "run"))
    asks = [Ask(r.row_id, "", r.ids_T[: r.start].tolist(), None) for r in rows.rows]
    with serve.running(resolved, place, "kimi", K) as server:
        found = load.measure(
            Place(server.url, server.model, K, "vLLM", vllm.COUNTERS),
            asks,
            Load(1, TOKENS, 0.0, False),
            0,
            600.0,
        )
    assert found.counters is not None and found.counters.drafts > 0
    served = 1 + found.counters.accepted / found.counters.drafts
    answers = {r.prompt: r.ids for r in found.requests}
    again = replayed(resolved, made, [(a.prompt_ids, answers[a.row_id]) for a in asks])
    assert served > 1.5  # it has learned these answers
    assert again == pytest.approx(served, rel=0.05), (served, again)


@torch.inference_mode()
def replayed(resolved, made, answers):
    engine = HFEngine(resolved.target, "float32", "cpu", made.contract.aux_layers, True)
    rows = []
    for prompt, answer in answers:
        seen = engine.states([prompt + answer])
        aux, last, top1 = (x[0] for x in (seen.aux_BTLD, seen.last_BTD, seen.top1_BT))
        rows.append(RowStates("", torch.tensor(prompt + answer), aux, last, top1, len(prompt)))
    accepted = replay.accepted_lengths(made, resolved.target.embedding_VD().float(), rows, K)
    return replay.tau([replay.walk(m, K) for m in accepted])
