"""What folders of other trainers say: the same drafter in every dialect is one card, and what is not said is unknown."""

import pytest
import torch

from eyas.contract import Rope
from eyas.drafter import dialects, facts
from eyas.errors import ContractError
from tests.drafter.folders import CONFIGS, IDS, foreign, target

SHAPE = {
    "architecture": "llama", "depth": 1, "hidden": 64, "target_hidden": 64, "mlp": 128, "heads": 4, "kv_heads": 2, "head_dim": 16,
    "qk_norm": False, "bias": False, "activation": "silu", "eps": 1e-5, "rope": Rope(10000.0), "window": None, "context": 512,
    "vocab": 512, "draft_vocab": 128, "map": "offsets", "head": "own", "before_residual": False, "fed_back": "hidden", "fc_norm": "none",
    "dtype": "bfloat16", "quantisation": None,
}  # fmt: skip


def card(folder, seen=None):
    return facts.gather(folder, seen).card


@pytest.mark.parametrize("dialect", CONFIGS)
def test_the_same_drafter_is_one_card_in_every_dialect(tmp_path, dialect):
    folder = foreign(tmp_path / "d", dialect)
    found = facts.gather(folder, target(tmp_path))
    assert found.reading.dialect == dialect
    assert {name: found.card[name].value for name in SHAPE} == SHAPE
    ids = (2, 5, 7) if dialect == "eagle" else (2, 4, 7)  # EAGLE's code has [2, n//2, n-3]
    assert found.card["aux_layers"].value == ids
    assert found.card["trained_length"].source == "unknown"


def test_latent_attention_is_read(tmp_path):
    found = facts.gather(foreign(tmp_path / "d", "mla"), target(tmp_path, "kimi_k2"))
    assert found.card["architecture"].value == "mla" and found.card["head_dim"].value == 16
    assert found.card["aux_layers"].value == (2, 4, 7)


@pytest.mark.parametrize(
    ("ids", "model_type", "expected"),
    [
        ([1, 3, 6], "llama", (2, 4, 7)),
        ([1, 3, 6], "kimi_k2", (2, 4, 7)),  # the first is 1: outputs, as for the others
        ([2, 4, 7], "kimi_k2", (2, 4, 7)),  # the first is not: as they are
        ([2, 4, 7], "llama", (3, 5, 8)),
        ([1, 3, 6], None, (2, 4, 7)),  # the same for every target
        ([2, 4, 7], None, None),  # depends on it
        ([-1, 3, 6], "llama", (0, 4, 7)),
    ],
)
def test_nested_layers_are_numbered_by_the_target_s_class(tmp_path, ids, model_type, expected):
    folder = foreign(tmp_path / "d", "sglang", lambda c: c["eagle_config"].update({IDS: ids}))
    found = card(folder, target(tmp_path, model_type) if model_type else None)["aux_layers"]
    assert found.value == expected
    assert found.known is (expected is not None)


UNSAID = {
    "no layers in a flat config": ("vllm", lambda c: c.pop(IDS), "aux_layers", "cannot be seen"),
    "no layers in ModelOpt's": (
        "modelopt",
        lambda c: c["eagle_config"].pop(IDS),
        "aux_layers",
        "cannot be seen",
    ),
    "layers as a string": ("vllm", lambda c: c.update({IDS: "[2, 4, 7]"}), "aux_layers", "not a list"),
    "layers that are no numbers": (
        "vllm",
        lambda c: c.update({IDS: [2, None, 7]}),
        "aux_layers",
        "not a list",
    ),
    "residual of speculators": (
        "speculators",
        lambda c: c.pop("norm_before_residual"),
        "before_residual",
        "takes false",
    ),
    "norm_output of SpecForge": ("sglang", lambda c: c.update(norm_output=True), "fed_back", "SpecForge"),
    "two thetas": ("vllm", lambda c: c.update(rope_parameters={"rope_theta": 5e5}), "rope", "differs"),
    "two scalings": (
        "vllm",
        lambda c: c.update(
            rope_scaling={"rope_type": "yarn", "factor": 4}, rope_parameters={"rope_type": "default"}
        ),
        "rope",
        "differ",
    ),
    "a theta of words": ("vllm", lambda c: c.update(rope_theta="big"), "rope", "rope_theta is"),
    "a flag of words": ("vllm", lambda c: c.update(norm_before_residual="yes"), "before_residual", "'yes'"),
}


@pytest.mark.parametrize("kind", UNSAID)
def test_what_is_not_said_is_unknown(tmp_path, kind):
    dialect, change, name, said = UNSAID[kind]
    found = card(foreign(tmp_path / "d", dialect, change), target(tmp_path))[name]
    assert not found.known and found.value is None and said in found.where


def test_an_absent_key_with_one_meaning_is_derived(tmp_path):
    found = card(
        foreign(
            tmp_path / "d",
            "vllm",
            lambda c: [c.pop(k) for k in ("norm_before_residual", "rope_theta", "rms_norm_eps")],
        )
    )
    assert (found["before_residual"].value, found["rope"].value.theta, found["eps"].value) == (
        False,
        10000.0,
        1e-6,
    )
    assert {found[n].source for n in ("before_residual", "rope", "eps", "fed_back")} == {"derived"}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}},
    ],
)
def test_old_and_new_spellings_of_rope_are_one(tmp_path, config):
    def change(c):
        c.pop("rope_theta")
        c.update(config)

    assert card(foreign(tmp_path / "d", "vllm", change))["rope"].value == Rope(
        5e5, (("kind", "yarn"), ("factor", 4.0))
    )


def test_what_is_no_eagle3_drafter_is_refused(tmp_path):
    with pytest.raises(ContractError, match=r"no fc\.weight"):
        card(foreign(tmp_path / "a", "vllm", change_tensors=lambda t: t.pop("fc.weight")))
    with pytest.raises(ContractError, match="dflash"):
        card(foreign(tmp_path / "b", "speculators", lambda c: c.update(speculators_model_type="dflash")))


def test_names_of_every_writer_are_one():
    assert dialects.canonical("model.layers.0.mlp.up_proj.weight") == "midlayer.mlp.up_proj.weight"
    assert dialects.canonical("aux_norm_mid.weight") == "fc_norm.1.weight"
    assert dialects.canonical("layers.1.mlp.up_proj.weight") == "layers.1.mlp.up_proj.weight"
    assert dialects.named("midlayer.mlp.up_proj.weight", "speculators") == "layers.0.mlp.up_proj.weight"


def test_sizes_that_the_config_leaves_out_follow_from_shapes(tmp_path):
    def change(c):
        for key in (
            "hidden_size",
            "intermediate_size",
            "head_dim",
            "draft_vocab_size",
            "vocab_size",
            "num_hidden_layers",
        ):
            c.pop(key)

    found = card(foreign(tmp_path / "d", "vllm", change))
    values = {n: found[n].value for n in ("hidden", "mlp", "head_dim", "draft_vocab", "vocab", "depth")}
    assert values == {"hidden": 64, "mlp": 128, "head_dim": 16, "draft_vocab": 128, "vocab": 512, "depth": 1}
    assert {found[n].source for n in values} == {"derived"}


def test_quantised_weights_are_seen(tmp_path):
    assert (
        card(
            foreign(tmp_path / "a", "vllm", lambda c: c.update(quantization_config={"quant_method": "fp8"}))
        )["quantisation"].value
        == "fp8"
    )
    scaled = foreign(
        tmp_path / "b", "vllm", change_tensors=lambda t: t.update({"fc.weight_scale": torch.ones(1)})
    )
    assert card(scaled)["quantisation"].value == "fc.weight_scale"
