"""What vLLM and SGLang make of a folder, by version: golden facts from their sources."""

import pytest
import torch

from eyas.contract import Rope
from eyas.drafter import facts
from eyas.engines import sglang_loader, vllm_loader
from eyas.engines.loading import parse
from tests.drafter.folders import IDS, foreign, target

V18, V22, V25, V32 = vllm_loader.READ
S14, S23 = sglang_loader.READ


def view(folder, version, seen=None, runner="V1"):
    loader = sglang_loader if version[1] == 5 else vllm_loader
    found = loader.views(version, facts.gather(folder, seen).folder)
    return found[-1] if runner == "V2" else found[0]


def value(folder, version, name, seen=None, runner="V1"):
    fact = view(folder, version, seen, runner).fields[name]
    return fact.value if fact.known else "unknown"


@pytest.mark.parametrize("version", vllm_loader.READ)
def test_a_flat_folder_loads_whole_in_every_vllm(tmp_path, version):
    found = view(foreign(tmp_path / "d", "vllm"), version, target(tmp_path))
    assert (found.refuses, found.left, found.skipped) == ([], [], ["t2d"])
    assert found.fields["aux_layers"].value == (2, 4, 7) and found.fields["map"].value == "offsets"


@pytest.mark.parametrize("version", sglang_loader.READ)
def test_a_nested_folder_loads_whole_in_every_sglang(tmp_path, version):
    found = view(foreign(tmp_path / "d", "sglang"), version, target(tmp_path))
    assert (found.refuses, found.left, found.skipped) == ([], [], ["t2d"])
    assert found.fields["aux_layers"].value == (2, 4, 7)


@pytest.mark.parametrize("version", vllm_loader.READ)
def test_a_speculators_folder_loads_whole_in_every_vllm(tmp_path, version):
    found = view(foreign(tmp_path / "d", "speculators"), version, target(tmp_path))
    assert (found.refuses, found.left) == ([], []) and found.fields["embedding"].value == "own"


def test_sglang_reads_no_speculators_folder(tmp_path):
    said = view(foreign(tmp_path / "d", "speculators"), S23, target(tmp_path)).refuses
    assert any("speculators format" in why for why in said)


@pytest.mark.parametrize(
    ("version", "runner", "expected"),
    [
        (V18, "V1", (2, 5, 7)),  # never looks into eagle_config: its default
        (V22, "V1", (1, 3, 6)),  # takes SGLang's numbers as they stand: one layer early
        (V32, "V1", (1, 3, 6)),
        (V32, "V2", (2, 5, 7)),
        (S14, "V1", (2, 4, 7)),
        (S23, "V1", (2, 4, 7)),
    ],
)
def test_layers_that_stand_in_eagle_config_alone(tmp_path, version, runner, expected):
    assert (
        value(foreign(tmp_path / "d", "sglang"), version, "aux_layers", target(tmp_path), runner) == expected
    )


def test_sglang_never_looks_at_the_top_level(tmp_path):
    folder = foreign(tmp_path / "d", "vllm")
    assert value(folder, S23, "aux_layers", target(tmp_path)) == (2, 5, 7)
    assert value(folder, S23, "aux_layers") == "unknown"  # the default of a target that is not given


@pytest.mark.parametrize(
    ("model_type", "ids", "expected"),
    [("kimi_k2", [2, 4, 7], (2, 4, 7)), ("kimi_k2", [1, 3, 6], (2, 4, 7)), ("llama", [2, 4, 7], (3, 5, 8))],
)
def test_sglang_numbers_by_the_target_s_class(tmp_path, model_type, ids, expected):
    folder = foreign(tmp_path / "d", "sglang", lambda c: c["eagle_config"].update({IDS: ids}))
    assert value(folder, S23, "aux_layers", target(tmp_path, model_type)) == expected


def test_gpt_oss_changed_between_two_versions_of_sglang(tmp_path):
    folder = foreign(tmp_path / "d", "sglang", lambda c: c["eagle_config"].update({IDS: [2, 5, 10]}))
    seen = target(tmp_path, "gpt_oss")
    assert value(folder, S14, "aux_layers", seen) == (3, 6, 11)
    assert value(folder, S23, "aux_layers", seen) == (2, 5, 10)
    assert view(folder, S14, seen).refuses and not view(folder, S23, seen).refuses


def test_the_last_output_is_captured_by_family_and_version(tmp_path):
    folder = foreign(tmp_path / "d", "vllm", lambda c: c.update({IDS: [2, 4, 10]}))
    assert view(folder, V18, target(tmp_path)).refuses == []
    assert any("before 0.25" in why for why in view(folder, V22, target(tmp_path, "kimi_k2")).refuses)
    assert view(folder, V25, target(tmp_path, "kimi_k2")).refuses == []


@pytest.mark.parametrize(
    ("version", "chunks", "fed"),
    [
        (V18, "none", "hidden"),
        (V22, "chunks", "normed"),
        (V32, "chunks", "normed"),
        (S14, "chunks", "normed"),
    ],
)
def test_the_flags_of_eagle_3_1_by_version(tmp_path, version, chunks, fed):
    folder = foreign(
        tmp_path / "d", "vllm", lambda c: c.update(fc_norm=True, norm_output=True),
        lambda t: t.update({f"fc_norm.{i}.weight": torch.ones(64) for i in range(3)}),
    )  # fmt: skip
    found = view(folder, version, target(tmp_path))
    assert (found.fields["fc_norm"].value, found.fields["fed_back"].value) == (chunks, fed)
    assert bool(found.refuses) is (version == V18)  # KeyError for tensors that it does not know


@pytest.mark.parametrize(
    ("version", "expected"), [(V18, "whole"), (V32, "whole"), (S14, "none"), (S23, "whole")]
)
def test_one_norm_before_fc_by_version(tmp_path, version, expected):
    folder = foreign(
        tmp_path / "d",
        "vllm",
        lambda c: c.update(norm_before_fc=True),
        lambda t: t.update({"input_norm.weight": torch.ones(192)}),
    )
    found = view(folder, version, target(tmp_path))
    assert found.fields["fc_norm"].value == expected
    assert ("input_norm.weight" in found.skipped) is (expected == "none")


def test_the_residual_s_default_depends_on_the_format(tmp_path):
    flat = foreign(tmp_path / "a", "vllm", lambda c: c.pop("norm_before_residual"))
    nested = foreign(tmp_path / "b", "speculators", lambda c: c.pop("norm_before_residual"))
    assert value(flat, V32, "before_residual") is False and value(nested, V32, "before_residual") is True
    assert (
        value(
            foreign(tmp_path / "c", "vllm", lambda c: c.update(norm_before_residual=True)),
            S23,
            "before_residual",
        )
        is False
    )


def test_a_theta_in_rope_parameters_alone_is_lost_before_0_25(tmp_path):
    def change(c):
        c.pop("rope_theta")
        c["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}

    folder = foreign(tmp_path / "d", "vllm", change)
    assert [value(folder, v, "rope") for v in (V18, V22, V25, V32)] == [
        Rope(1e4),
        Rope(1e4),
        Rope(5e5),
        Rope(5e5),
    ]


def test_yarn_s_mscale_is_read_by_the_newer_sglang_alone(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    folder = foreign(tmp_path / "d", "sglang", lambda c: c.update(rope_scaling=scaling))
    assert "mscale" not in dict(value(folder, S14, "rope").scaling) and "mscale" in dict(
        value(folder, S23, "rope").scaling
    )


def test_what_nothing_fills_is_named(tmp_path):
    folder = foreign(
        tmp_path / "d",
        "vllm",
        change_tensors=lambda t: [
            t.pop(n) for n in ("midlayer.self_attn.k_proj.weight", "d2t", "lm_head.weight")
        ],
    )
    for version in (V18, V32, S14, S23):
        found = view(folder, version, target(tmp_path))
        assert (
            set(found.left) >= {"midlayer.self_attn.k_proj.weight", "lm_head.weight"}
            and found.fields["map"].value == "first ids"
        )


def test_an_unknown_tensor_stops_vllm_and_is_skipped_by_sglang(tmp_path):
    folder = foreign(
        tmp_path / "d", "vllm", change_tensors=lambda t: t.update({"extra.weight": torch.ones(2)})
    )
    assert any("extra.weight" in why for why in view(folder, V32).refuses)
    assert "extra.weight" in view(folder, S23).skipped


def test_a_map_of_the_whole_vocabulary_stops_vllm_0_32(tmp_path):
    folder = foreign(
        tmp_path / "d", "vllm", lambda c: c.update(draft_vocab_size=512),
        lambda t: t.update({"lm_head.weight": torch.ones(512, 64), "d2t": torch.zeros(512, dtype=torch.int64)}),
    )  # fmt: skip
    assert any("d2t" in why for why in view(folder, V32).refuses) and view(folder, V25).refuses == []


@pytest.mark.parametrize(
    ("change", "version", "said"),
    [
        (lambda c: c.update(architectures=["Qwen3ForCausalLM"]), V22, "Eagle3Qwen3ForCausalLM"),
        (lambda c: c.update(architectures=["MistralForCausalLM"]), V32, "MistralForCausalLM"),
        (lambda c: c.update(architectures=["LlamaForCausalLM"]), S23, "LlamaForCausalLM"),
        (lambda c: c.pop("model_type"), V32, "model_type"),
        (lambda c: c.pop("draft_vocab_size"), S23, "draft_vocab_size"),
        (lambda c: c.update(target_hidden_size=None), V32, "null"),
        (lambda c: c.update(target_hidden_size=None), S23, "null"),
        (lambda c: c.update(hidden_act="gelu"), V32, "silu"),
        (lambda c: c.update({IDS: [2, 4, 11]}), V32, "beyond"),
        (lambda c: c.update({IDS: [2, 4, 4]}), V32, "repeat"),
        (lambda c: c.update(max_position_embeddings=128), S23, "max_position_embeddings"),
        (lambda c: c.update(intermediate_size=256), V32, "shape"),
    ],
)
def test_what_stops_an_engine_is_named(tmp_path, change, version, said):
    assert any(
        said in why
        for why in view(foreign(tmp_path / "d", "vllm", change), version, target(tmp_path)).refuses
    )


def test_a_latent_drafter_is_taken_for_mtp_by_its_model_type(tmp_path):
    theirs = foreign(tmp_path / "a", "mla", lambda c: c.update(model_type="deepseek_v3"))
    mine = foreign(tmp_path / "b", "mla", lambda c: c.update(model_type="deepseek_v2"))
    seen = target(tmp_path, "kimi_k2")
    assert (
        any("MTP" in why for why in view(theirs, V32, seen).refuses) and view(mine, V32, seen).refuses == []
    )
    assert any("factor" in why for why in view(mine, V25, seen).refuses)  # no rope_scaling
    assert value(mine, V22, "rope", seen).theta == 10000.0 and value(mine, V32, "rope", seen).theta == 50000.0


@pytest.mark.parametrize(
    ("version", "known"), [("0.17.0", False), ("0.20.0", True), ("0.33.0", False), ("0.32.0", True)]
)
def test_between_two_read_versions_what_both_say_is_known(tmp_path, version, known):
    found = view(foreign(tmp_path / "d", "vllm"), parse(version), target(tmp_path))
    assert found.fields["aux_layers"].known is known
    if not known:
        assert any("nothing is known" in note for note in found.notes)


def test_between_two_read_versions_that_differ_it_is_unknown(tmp_path):
    folder = foreign(tmp_path / "d", "vllm", lambda c: c.update(norm_output=True))
    assert value(folder, parse("0.20.0"), "fed_back", target(tmp_path)) == "unknown"
    assert value(folder, parse("0.24.0"), "fed_back", target(tmp_path)) == "normed"


@pytest.mark.parametrize(
    ("version", "kind", "device", "runner"),
    [("0.18.1", "llama", "cuda", "V1"), ("0.32.0", "llama", "cuda", "V2"), ("0.32.0", "llama", "cpu", "V1"), ("0.25.1", "kimi_k2", "cuda", "V1"), ("0.25.1", "llama", "cuda", "V2"), ("0.25.1", "mixtral", "cuda", None)],
)  # fmt: skip
def test_the_runner_that_a_version_takes(version, kind, device, runner):
    assert vllm_loader.default_runner(parse(version), kind, device) == runner
