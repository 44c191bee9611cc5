"""A drafter in another dialect and back: the same bits, the same contract; what cannot be said is refused, and nothing is left."""

import json

import pytest
import torch
from safetensors.torch import load_file

from eyas.check import stage
from eyas.contract import FIELDS, Norms, for_target
from eyas.convert import convert
from eyas.drafter import disk, facts
from eyas.drafter.network import Drafter
from eyas.errors import ContractError, UsageError
from tests.drafter.folders import CONFIGS, IDS, KEPT, foreign, target


def ours(tmp_path, norms=("none", False, False), ids=(2, 5, 7), theta=10000.0, vocab=128):
    seen = target(tmp_path)
    made = Drafter(for_target(seen, list(ids), Norms(norms[1], norms[0], norms[2]), vocab, 3, 32))
    made.reset(0, KEPT if vocab == 128 else torch.arange(vocab), torch.randn(vocab, 64), torch.ones(64))
    disk.write(tmp_path / "ours", made, {"epoch": 1}, ["0123456789abcdef"])
    return tmp_path / "ours", seen


@pytest.mark.parametrize(
    ("to", "norms"),
    [
        ("vllm", ("chunks", True, True)), ("sglang", ("chunks", False, True)), ("sglang", ("whole", False, False)),
        ("speculators", ("chunks", True, True)), ("speculators", ("whole", False, True)), ("modelopt", ("none", False, False)),
        ("eagle", ("none", False, False)),
    ],
)  # fmt: skip
def test_there_and_back_is_bitwise_the_same(tmp_path, to, norms):
    folder, seen = ours(tmp_path, norms)
    convert(folder, tmp_path / "theirs", to, None, seen)
    convert(tmp_path / "theirs", tmp_path / "back", "vllm", None, seen)
    before, after = (load_file(p / "model.safetensors") for p in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before)
    for name in ("config.json", "contract.json", "metrics.json", "trained_on.txt"):
        assert (folder / name).read_text() == (tmp_path / "back" / name).read_text(), name
    assert disk.read(tmp_path / "back").contract == disk.read(folder).contract


@pytest.mark.parametrize("source", CONFIGS)
@pytest.mark.parametrize("to", CONFIGS)
def test_a_drafter_of_others_means_the_same_in_every_dialect(tmp_path, source, to):
    folder = foreign(tmp_path / "d", source)
    seen = target(tmp_path)
    if to == "eagle" and source != "eagle":  # its code has other layers fixed
        with pytest.raises(ContractError, match="fixed"):
            convert(folder, tmp_path / "out", to, None, seen)
        return
    convert(folder, tmp_path / "out", to, None, seen)
    a, b = facts.gather(folder, seen), facts.gather(tmp_path / "out", seen)
    assert b.reading.dialect == to
    assert {n: a.card[n].value for n in FIELDS if n != "dtype"} == {
        n: b.card[n].value for n in FIELDS if n != "dtype"
    }
    assert [f for f in stage.check(tmp_path / "out", seen)[0] if f.severity != "info"] == []
    mine, theirs = (load_file(p / "model.safetensors") for p in (folder, tmp_path / "out"))
    assert torch.equal(mine["d2t"], theirs["d2t"]) and torch.equal(mine["fc.weight"], theirs["fc.weight"])
    assert ("t2d" in theirs) is (to != "modelopt")


def test_the_layer_s_tensors_have_the_dialect_s_names(tmp_path):
    folder, seen = ours(tmp_path)
    convert(folder, tmp_path / "a", "speculators", None, seen)
    convert(folder, tmp_path / "b", "sglang", None, seen)
    assert "layers.0.mlp.up_proj.weight" in load_file(tmp_path / "a" / "model.safetensors")
    assert "midlayer.mlp.up_proj.weight" in load_file(tmp_path / "b" / "model.safetensors")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["eagle_config"][IDS] == [1, 4, 6]


def test_one_folder_serves_both_engines(tmp_path):
    folder = foreign(tmp_path / "d", "speculators")
    convert(folder, tmp_path / "out", "vllm", None, target(tmp_path, "kimi_k2"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config[IDS] == [2, 4, 7] and config["eagle_config"][IDS] == [
        2,
        4,
        7,
    ]  # Kimi's class takes these as they are
    assert "rope_theta" in config and config["torch_dtype"] == config["dtype"] == "bfloat16"


def test_a_map_of_the_whole_vocabulary_is_left_out_for_vllm(tmp_path):
    folder, seen = ours(tmp_path, vocab=512)
    assert "d2t" not in load_file(folder / "model.safetensors")
    assert stage.look(folder, seen)["healthy"]
    convert(folder, tmp_path / "a", "sglang", None, seen)
    assert load_file(tmp_path / "a" / "model.safetensors")["d2t"].tolist() == [0] * 512
    convert(tmp_path / "a", tmp_path / "b", "vllm", None, seen)
    assert "d2t" not in load_file(tmp_path / "b" / "model.safetensors")


REFUSED = {
    "a residual that SGLang does not add": ("sglang", ("none", True, False), None, "un-normed"),
    "a norm that EAGLE does not have": ("eagle", ("chunks", False, False), None, "no norm before fc"),
    "feedback that ModelOpt does not have": ("modelopt", ("none", False, True), None, "un-normed state back"),
    "flags that the version does not read": (
        "vllm",
        ("chunks", False, True),
        "0.18.1",
        "vllm cannot express",
    ),
    "flags that speculators' reader in the version does not copy": (
        "speculators",
        ("chunks", False, False),
        "0.22.1",
        "cannot express",
    ),
    "a version that was not read": ("vllm", ("none", False, False), "0.40.0", "outside"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_expressed_is_refused_and_nothing_is_left(tmp_path, kind):
    to, norms, version, said = REFUSED[kind]
    folder, seen = ours(tmp_path, norms)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ContractError, match=said):
        convert(folder, tmp_path / "out", to, version, seen)
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_unknown_is_not_written(tmp_path):
    with pytest.raises(ContractError, match="norm_before_residual"):
        convert(
            foreign(tmp_path / "d", "speculators", lambda c: c.pop("norm_before_residual")),
            tmp_path / "o",
            "vllm",
            None,
            None,
        )
    with pytest.raises(ContractError, match="give --target"):
        convert(foreign(tmp_path / "e", "vllm"), tmp_path / "o", "sglang", None, None)
    with pytest.raises(ContractError, match="latent attention"):
        convert(
            foreign(tmp_path / "f", "mla"), tmp_path / "o", "speculators", None, target(tmp_path, "kimi_k2")
        )


def test_a_fault_is_not_carried_along(tmp_path):
    folder = foreign(tmp_path / "d", "vllm", change_tensors=lambda t: t["norm.weight"].fill_(float("nan")))
    with pytest.raises(ContractError, match=r"faults.*norm\.weight"):
        convert(folder, tmp_path / "o", "speculators", None, target(tmp_path))


def test_a_folder_that_is_there_and_a_dialect_that_is_not_are_refused(tmp_path):
    folder, seen = ours(tmp_path)
    for out, to, version, said in (
        (folder, "vllm", None, "there already"),
        (tmp_path / "o", "gguf", None, "known dialects"),
        (tmp_path / "o", "eagle", "1.0", "no engine"),
    ):
        with pytest.raises(UsageError, match=said):
            convert(folder, out, to, version, seen)


def test_what_a_kill_left_is_replaced(tmp_path):
    folder, seen = ours(tmp_path)
    (tmp_path / "out.new").mkdir()
    (tmp_path / "out.new" / "model.safetensors").write_bytes(b"half")
    convert(folder, tmp_path / "out", "vllm", None, seen)
    assert not (tmp_path / "out.new").exists() and stage.look(tmp_path / "out", seen)["healthy"]
