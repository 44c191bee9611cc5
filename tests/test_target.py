import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas import target as targets
from eyas.errors import ContractError, UsageError
from tests.conftest import save_target


@pytest.fixture
def folder(tmp_path):
    return save_target(tmp_path / "t", layers=2)


def change(folder, name="config.json", **values):
    path = folder / name
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_facts(folder):
    t = targets.load(folder)
    assert (t.layers, t.hidden, t.vocab, t.heads, t.kv_heads, t.head_dim, t.stop_ids) == (
        2,
        32,
        260,
        4,
        2,
        8,
        (3,),
    )
    assert t.head_VD().shape == t.embedding_VD().shape == (260, 32)


def test_default_layers_are_the_engines():
    def default(n):
        t = object.__new__(targets.Target)
        object.__setattr__(t, "layers", n)
        object.__setattr__(t, "folder", "x")
        return t.default_aux_layers().value

    assert default(30) == [2, 15, 27]
    assert default(61) == [2, 30, 58]
    assert default(32) == [2, 16, 29]
    with pytest.raises(UsageError, match="Set target.aux_layers"):
        default(4)


@pytest.mark.parametrize("ids", [[], [2, 1], [1, 1], [-1, 0], [0, 3]])
def test_bad_layer_ids(folder, ids):
    with pytest.raises(UsageError, match="between 0 and 2"):
        targets.load(folder).check_aux_layers(ids)


def test_a_tied_head_is_the_embedding(tmp_path):
    t = targets.load(save_target(tmp_path / "t", tie_word_embeddings=True))
    assert torch.equal(t.head_VD(), t.embedding_VD())


def test_no_head_and_not_tied_is_an_error(tmp_path):
    folder = save_target(tmp_path / "t", tie_word_embeddings=True)
    change(folder, tie_word_embeddings=False)
    with pytest.raises(ContractError, match=r"no lm_head\.weight"):
        targets.load(folder).head_VD()


def test_an_indexed_and_nested_target(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i, half in enumerate((names[::2], names[1::2])):
        file = f"model-{i}.safetensors"
        save_file({f"language_model.{n}": tensors[n] for n in half}, folder / file)
        weight_map |= {f"language_model.{n}": file for n in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    inner = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"model_type": "outer", "text_config": inner, "eos_token_id": [3, 9]})
    )
    (folder / "generation_config.json").unlink()
    t = targets.load(folder)
    assert t.stop_ids == (3, 9) and t.hidden == 32
    assert torch.equal(t.head_VD(), tensors["lm_head.weight"])
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(UsageError, match=r"model-1\.safetensors, which is not there"):
        targets.load(folder)


def test_norms_of_one_plus_weight_families(folder):
    plain = targets.load(folder).final_norm_D()
    change(folder, model_type="gemma2")
    assert torch.equal(targets.load(folder).final_norm_D(), plain + 1)


def test_what_cannot_be_a_target(tmp_path, folder):
    for path, said in ((tmp_path / "none", "is not a folder"), (tmp_path, "no config.json")):
        with pytest.raises(UsageError, match=said):
            targets.load(path)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:1000])
    with pytest.raises(UsageError, match="not a readable safetensors"):
        targets.load(folder)
    (folder / "model.safetensors").rename(folder / "model.gguf")
    with pytest.raises(UsageError, match=r"Found model\.gguf: convert it"):
        targets.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UsageError, match="not valid JSON"):
        targets.load(folder)


def test_the_fingerprint_does_not_depend_on_the_library_that_wrote_the_files(folder):
    before = targets.load(folder).fingerprint
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "9.9"}, indent=7))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert targets.load(folder).fingerprint == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_the_fingerprint_changes_with_what_a_drafter_depends_on(folder, name):
    before = targets.load(folder).fingerprint
    path = folder / name
    if name == "config.json":
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 77.0}))
    elif name == "tokenizer.json":
        tokenizer = json.loads(path.read_text())
        first = next(iter(tokenizer["model"]["vocab"]))
        tokenizer["model"]["vocab"]["another"] = tokenizer["model"]["vocab"].pop(first)
        path.write_text(json.dumps(tokenizer))
    else:
        path.write_text(path.read_text() + " ")
    assert targets.load(folder).fingerprint != before


def test_a_changed_weight_changes_the_fingerprint(folder):
    before = targets.load(folder).fingerprint
    assert targets.load(folder).fingerprint == before
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors")
    assert targets.load(folder).fingerprint != before


def test_a_target_without_template_is_refused(folder):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="no chat template"):
        targets.load(folder).tokenizer()
