"""Reading safetensors without torch: values, NaN and infinity of every type, and files that lie."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eyas.errors import ContractError
from eyas.stores import weights


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32]
)
def test_values_are_those_that_torch_reads(tmp_path, dtype):
    made = (torch.randn(3, 5, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    save_file({"a": made, "b": made[:1].clone()}, tmp_path / "model.safetensors")
    found = weights.opened(tmp_path)
    assert found.problems == () and list(found.tensors) == ["a", "b"]
    assert found.tensors["a"].shape == (3, 5)
    assert torch.equal(torch.from_numpy(found.values("a").astype(np.float64)), made.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), -float("nan")])
def test_a_nan_or_infinity_of_either_sign_is_found(tmp_path, dtype, bad):
    most = torch.finfo(dtype).max
    healthy = torch.tensor([most, -most, 0.0, -0.0, torch.finfo(dtype).tiny], dtype=dtype)
    ill = healthy.clone()
    ill[3] = bad
    save_file({"healthy": healthy, "ill": ill, "ids": torch.tensor([-1, 2])}, tmp_path / "model.safetensors")
    assert weights.opened(tmp_path).infinite() == ["ill"]


def test_the_last_value_of_a_large_tensor_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SCAN_BYTES", 64)
    made = torch.zeros(1001)
    save_file({"a": made}, tmp_path / "model.safetensors")
    assert weights.opened(tmp_path).infinite() == []
    made[-1] = float("inf")
    save_file({"a": made}, tmp_path / "model.safetensors")
    assert weights.opened(tmp_path).infinite() == ["a"]


def test_an_index_with_several_files_is_read(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "x-1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "x-2.safetensors")
    (tmp_path / weights.INDEX).write_text(
        json.dumps({"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}})
    )
    found = weights.opened(tmp_path)
    assert sorted(found.tensors) == ["a", "b"] and found.problems == ()


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "gone.safetensors"]
)
def test_an_index_that_leaves_the_folder_is_not_followed(tmp_path, name):
    folder = tmp_path / "d"
    (folder / "sub").mkdir(parents=True)
    for path in (tmp_path / "secret.safetensors", folder / "sub" / "x.safetensors"):
        save_file({"a": torch.ones(2)}, path)
    (folder / weights.INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    found = weights.opened(folder)
    assert found.tensors == {} and len(found.problems) == 1 and name[:20] in found.problems[0]


def lying(header, rest=b"\0" * 64):
    raw = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(raw)) + raw + rest


GOOD = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
LIES = {
    "too short": b"\1\2",
    "empty": b"",
    "a header longer than the file": struct.pack("<Q", 1 << 40) + b"{}",
    "a header that is not JSON": lying(b"{]"),
    "a deep header": lying(b"[" * 100_000),
    "a list": lying([1]),
    "an unknown type": lying({"a": GOOD | {"dtype": "X9"}}),
    "a type that is a list": lying({"a": GOOD | {"dtype": [1]}}),
    "a negative size": lying({"a": GOOD | {"shape": [-4]}}),
    "a size that is true": lying({"a": GOOD | {"shape": [True]}}),
    "a size that is a float": lying({"a": GOOD | {"shape": [4.0]}}),
    "a huge size": lying({"a": GOOD | {"shape": [10**30, 10**30]}}),
    "offsets beyond the file": lying({"a": GOOD | {"shape": [400], "data_offsets": [0, 1600]}}),
    "offsets backwards": lying({"a": GOOD | {"data_offsets": [16, 0]}}),
    "another size than the shape": lying({"a": GOOD | {"data_offsets": [0, 12]}}),
    "no offsets": lying({"a": {"dtype": "F32", "shape": [4]}}),
    "an entry that is a number": lying({"a": 3}),
    "a name that is a number": lying({"a": None}),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_file_that_lies_is_one_problem_and_no_tensor(tmp_path, kind):
    (tmp_path / "model.safetensors").write_bytes(LIES[kind])
    found = weights.opened(tmp_path)
    assert len(found.problems) == 1 and "model.safetensors" in found.problems[0]


def test_pickles_are_named_and_not_opened(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert weights.opened(tmp_path).pickles == ("pytorch_model.bin",)


@pytest.mark.parametrize("text", ["", "[]", "{", "nul", "[" * 100_000, '{"a": 1e999999}x', "\x00"])
def test_a_config_that_is_no_object_says_what_it_is(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ContractError, match=r"config\.json"):
        weights.read_json(tmp_path / "config.json")


def test_a_huge_config_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "JSON_BYTES", 10)
    (tmp_path / "config.json").write_text('{"a": "0123456789"}')
    with pytest.raises(ContractError, match="thousands at most"):
        weights.read_json(tmp_path / "config.json")


def test_a_large_tensor_is_not_looked_at(tmp_path, monkeypatch):
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(weights, "VALUE_BYTES", 100)
    with pytest.raises(ContractError, match="too many"):
        weights.opened(tmp_path).values("a")
