import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas import contract as contracts
from eyas.contract import Norms
from eyas.drafter import disk
from eyas.errors import ContractError
from tests.conftest import contract, drafter

VARIANTS = [
    Norms(False, "none", False),
    Norms(True, "chunks", False),
    Norms(False, "whole", True),
    Norms(False, "chunks", True, qk=True),
]


@pytest.mark.parametrize("norms", VARIANTS, ids=str)
def test_a_drafter_read_back_is_bitwise_the_one_written(tmp_path, norms):
    made = drafter(norms=norms, dtype="float32")
    disk.write(tmp_path / "d", made, {"epoch": 1})
    back = disk.read(tmp_path / "d")
    assert back.contract == made.contract
    for name, tensor in made.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_names_and_config_are_those_that_vllm_reads(tmp_path):
    made = drafter()
    disk.write(tmp_path / "d", made, {})
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    assert set(tensors) == {
        "fc.weight", "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight", "norm.weight", "lm_head.weight",
        "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "midlayer.post_attention_layernorm.weight",
        "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight",
        "midlayer.self_attn.o_proj.weight", "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight",
        "midlayer.mlp.down_proj.weight", "d2t", "t2d",
    }  # fmt: skip
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (16, 32)  # reads [embedding; hidden]
    assert tensors["fc.weight"].dtype == torch.bfloat16
    kept = torch.arange(24) + tensors["d2t"]  # offsets
    assert torch.equal(kept, tensors["t2d"].nonzero().flatten())
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert (
        config["tie_word_embeddings"] is False
        and config["draft_vocab_size"] == 24
        and config["fc_norm"] is True
    )


def test_a_missing_tensor_is_named(tmp_path):
    disk.write(tmp_path / "d", drafter(), {})
    path = tmp_path / "d" / "model.safetensors"
    tensors = load_file(path)
    del tensors["midlayer.mlp.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(ContractError, match=r'"midlayer\.mlp\.up_proj\.weight" is missing'):
        disk.read(tmp_path / "d")


def test_a_truncated_file_and_a_broken_contract_are_refused(tmp_path):
    disk.write(tmp_path / "d", drafter(), {})
    path = tmp_path / "d" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ContractError, match="not a readable safetensors"):
        disk.read(tmp_path / "d")
    (tmp_path / "d" / "contract.json").write_text('{"hidden": 16}')
    with pytest.raises(ContractError, match="not a contract"):
        disk.read(tmp_path / "d")


def test_the_contract_survives_its_file(tmp_path):
    c = contract(norms=Norms(True, "whole", True))
    c.write(tmp_path / "contract.json")
    assert contracts.read(tmp_path / "contract.json") == c
    assert dataclasses.asdict(c)["aux_layers"] == (1, 2, 3)
