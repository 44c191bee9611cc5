"""Each rule with a folder that breaks it, and the healthy twin that gives no finding."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas import target as targets
from eyas.causes import healthy
from eyas.check import rules
from eyas.contract import Norms, for_target
from eyas.drafter import dialects
from eyas.drafter.network import Drafter


@pytest.fixture
def target(target_folder):
    return targets.load(target_folder)


@pytest.fixture
def folder(tmp_path, target):
    made = Drafter(for_target(target, [0, 1, 2], Norms(False, "chunks", False), 64, 3, 32))
    made.reset(0, torch.cat([torch.arange(8), torch.arange(100, 156)]), torch.randn(64, 32), torch.ones(32))
    dialects.write(tmp_path / "drafter", made, {})
    return tmp_path / "drafter"


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path)


def change_config(folder, **values):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_a_healthy_drafter_gives_no_finding(folder, target):
    assert rules.check(folder, target) == []


def test_without_a_target_it_says_so_and_stays_healthy(folder):
    findings = rules.check(folder, None)
    assert [f.severity for f in findings] == ["info"] and healthy(findings)


ABSOLUTE = torch.cat([torch.arange(8), torch.arange(100, 156)])
BROKEN = {
    "missing tensor": (
        lambda t: t.pop("midlayer.self_attn.o_proj.weight"),
        "tensors",
        'o_proj.weight" is missing',
    ),
    "unknown tensor": (lambda t: t.update(extra=torch.zeros(1)), "tensors", '"extra" is not part'),
    "transposed tensor": (
        lambda t: t.update({"fc.weight": t["fc.weight"].T}),
        "tensors",
        "has shape (96, 32), expected (32, 96)",
    ),
    "not a number": (
        lambda t: t["lm_head.weight"][3].fill_(float("nan")),
        "finite",
        "lm_head.weight holds NaN",
    ),
    "absolute d2t": (lambda t: t.update(d2t=ABSOLUTE.clone()), "vocabulary", "absolute ids"),
    "d2t of zeros": (lambda t: t["d2t"].zero_(), "vocabulary", "keep different ids"),
    "repeated ids": (lambda t: t["d2t"].__setitem__(9, t["d2t"][9] - 1), "vocabulary", "ids repeat"),
    "d2t of another type": (lambda t: t.update(d2t=t["d2t"].int()), "vocabulary", "need int64"),
    "no d2t": (lambda t: t.pop("d2t"), "tensors", '"d2t" is missing'),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_weights_are_named(folder, target, name):
    change, rule, said = BROKEN[name]
    change_tensors(folder, change)
    findings = rules.check(folder, target)
    assert not healthy(findings)
    assert any(f.rule == rule and said in f.message for f in findings), findings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eagle_aux_hidden_state_layer_ids", [0, 1, 1]),
        ("eagle_aux_hidden_state_layer_ids", None),
        ("norm_before_residual", True),
        ("fc_norm", False),
        ("rope_theta", 1e6),
        ("head_dim", 16),
        ("tie_word_embeddings", True),
        ("draft_vocab_size", 260),
        ("architectures", ["LlamaForCausalLM"]),
    ],
)
def test_a_config_that_says_other_than_the_contract_is_an_error(folder, target, key, value):
    change_config(folder, **{key: value})
    findings = rules.check(folder, target)
    assert [f.severity for f in findings] == ["error"] and key in findings[0].message


def test_another_target_is_told_apart(folder, target):
    deeper = dataclasses.replace(target, layers=5)
    assert any("number of layers" in f.message for f in rules.check(folder, deeper))
    other = dataclasses.replace(target)
    other.__dict__["fingerprint"] = "0" * 16
    findings = rules.check(folder, other)
    assert [f.severity for f in findings] == ["warning"] and healthy(findings)


def test_stop_ids_outside_the_vocabulary_are_an_error(folder, target):
    raw = json.loads((folder / "contract.json").read_text()) | {"stop_ids": [3, 50]}
    (folder / "contract.json").write_text(json.dumps(raw))
    assert any("ends are never drafted" in f.message for f in rules.check(folder, None))


@pytest.mark.parametrize("name", ["config.json", "contract.json", "model.safetensors"])
def test_a_folder_without_a_file_is_one_error(folder, target, name):
    (folder / name).unlink()
    findings = rules.check(folder, target)
    assert [f.rule for f in findings] == ["read"] and name in findings[0].message
