"""plan --profile in a server: the fake vLLM that answers with the tiny target."""

import pytest

from eyas import outside


@pytest.mark.slow
def test_the_profile_of_a_server(finished, fake_vllm, tmp_path):
    sets = ("engine.name=vllm", f"engine.python={fake_vllm}", "engine.env={FAKE_REAL: '1'}", "bench.concurrency=[1, 2]", "bench.k=[3]")  # fmt: skip
    made = outside.profile(str(finished[0]), sets, str(tmp_path / "run"))["profile"]
    assert [(c["k"], c["concurrency"]) for c in made["costs"]] == [(3, 1), (3, 2)]
    assert made["engine"].startswith("vLLM 0.32.0") and all(1 <= c["tau"] < 1.6 for c in made["costs"])
