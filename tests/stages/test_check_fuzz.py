"""Whatever a drafter's folder holds, check ends with findings or one clear error: it neither crashes, hangs, nor leaves the folder."""

import copy
import json
import random
import shutil

import pytest

from eyas.check import engine_rules, mend, stage
from eyas.drafter import facts
from eyas.engines import sglang_loader, vllm_loader
from eyas.errors import EyasError
from tests.drafter.folders import CONFIGS, MLA, foreign, target

STRANGE = [
    None, True, False, 0, -1, 1, 3, 2**31, 10**30, -0.5, 1e308, float("inf"), float("nan"), "", "x", "[2, 4, 7]", "../../etc/passwd", [], [[]], [1],
    [0, 1, 2], [None], ["a"], [2**40], [-5, 3], {}, {"a": 1}, {"rope_type": "yarn", "factor": []}, {"rope_theta": "big"}, [1.5, 2], "\u0000\ud7ff",
    {"quant_method": ["fp8"]}, {"eagle_aux_hidden_state_layer_ids": "x"}, ["sliding_attention"], [{}], 64, 128, 512,
]  # fmt: skip


def mutated(rng, value, depth=0):
    """A config with some values strange, some keys gone, some new."""
    if isinstance(value, dict):
        out = {k: mutated(rng, v, depth + 1) for k, v in value.items() if rng.random() > 0.06}
        if rng.random() < 0.3:
            out[rng.choice(["rope_scaling", "rope_parameters", "eagle_config", "layer_types", "sliding_window", "target_hidden_size", "fc_norm", "norm_before_fc", "norm_output", "num_aux_hidden_states", "quantization_config", "speculators_model_type", "transformer_layer_config", "kv_lora_rank", "tie_word_embeddings", "use_aux_norm", "partial_rotary_factor"])] = copy.deepcopy(rng.choice(STRANGE))  # fmt: skip
        return out
    return copy.deepcopy(rng.choice(STRANGE)) if rng.random() < 0.12 else value


def everything(folder, seen):
    """All that looks at a folder; EyasError is an answer too."""
    for given in (None, seen):
        assert all(f["message"] for f in stage.look(folder, given)["findings"])
        for loader in (vllm_loader, sglang_loader):
            for version in (*loader.READ, (0, 24, 0), (9,)):
                name = "vllm" if loader is vllm_loader else "sglang"
                stage.check(folder, given, engine_rules.Named(name, version))
    try:
        mend.mend(facts.gather(folder, seen))
    except EyasError:
        return


@pytest.mark.parametrize("seed", range(40))
def test_strange_configs(tmp_path, seed):
    rng = random.Random(seed)
    dialect = rng.choice([*CONFIGS, "mla"])
    folder = foreign(tmp_path / "d", dialect)
    config = mutated(rng, copy.deepcopy(MLA if dialect == "mla" else CONFIGS[dialect]))
    (folder / "config.json").write_text(json.dumps(config))
    before = sorted(p.name for p in tmp_path.iterdir())
    everything(folder, target(tmp_path, rng.choice(["llama", "kimi_k2", "gpt_oss"])))
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("seed", range(30))
def test_strange_bytes(tmp_path, seed):
    rng = random.Random(seed)
    folder = foreign(tmp_path / "d", rng.choice(list(CONFIGS)))
    path = folder / rng.choice(["model.safetensors", "config.json"])
    raw = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 40)):
        raw[rng.randrange(min(len(raw), 3000))] = rng.randrange(256)
    path.write_bytes(bytes(raw[: rng.choice([len(raw), len(raw) // 2, 100, 8, 3])]))
    before = sorted(p.name for p in tmp_path.iterdir())
    everything(folder, target(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("seed", range(30))
def test_strange_contracts(tmp_path, finished, seed):
    rng = random.Random(seed)
    folder = tmp_path / "d"
    shutil.copytree(finished[1] / "drafter" / "best", folder)
    contract = json.loads((folder / "contract.json").read_text())
    (folder / "contract.json").write_text(json.dumps(mutated(rng, contract)))
    try:
        everything(folder, target(tmp_path))
    except EyasError as e:
        assert "contract" in str(e)
