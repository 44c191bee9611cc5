"""Readers of files that users bring: whatever is in them, an EyasError or a result, never a crash or a hang."""

import json
import struct

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas import contract, recipe
from eyas import target as targets
from eyas.errors import EyasError
from eyas.generate import prompts
from eyas.rundir import file_hash
from eyas.schema import PromptsSection
from eyas.stores import conversations, states
from eyas.stores.conversations import Row
from tests.conftest import random_row

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
trees = st.recursive(
    scalars,
    lambda t: st.lists(t, max_size=4) | st.dictionaries(st.text(max_size=12), t, max_size=4),
    max_leaves=12,
)


def survives(read, *args):
    """Reads, or says what is wrong."""
    try:
        return read(*args)
    except EyasError as e:
        assert str(e)
        return None


@few
@given(data=st.binary(max_size=400))
def test_recipes_of_any_bytes(tmp_path, data):
    path = tmp_path / "r.yaml"
    path.write_bytes(data)
    survives(recipe.read, path)


@few
@given(
    section=st.sampled_from(["target", "prompts", "generate", "train", "bench", "report", "extract"]),
    tree=trees,
)
def test_recipes_of_any_tree(tmp_path, section, tree):
    path = tmp_path / "r.yaml"
    path.write_text(
        yaml.safe_dump({"name": "a", "target": {"model": "m"}} | {section: tree}, allow_unicode=True)
    )
    survives(recipe.read, path)


@few
@given(words=st.text(max_size=40))
def test_set_of_any_text(tmp_path, words):
    path = tmp_path / "r.yaml"
    path.write_text("name: a\ntarget: {model: m}\n")
    survives(recipe.read, path, (words,))


@few
@given(lines=st.lists(st.binary(max_size=60) | trees.map(lambda t: json.dumps(t).encode()), max_size=12))
def test_prompt_files_of_any_lines(tmp_path, lines):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\n".join(lines))
    survives(prompts.read, PromptsSection(sources=[{"path": str(path)}], held_out=0.5))


@few
@given(
    data=st.binary(max_size=300), cut=st.integers(0, 2000), at=st.integers(0, 2000), byte=st.integers(0, 255)
)
def test_conversation_parts_with_any_damage(tmp_path, data, cut, at, byte):
    path = tmp_path / "part-00000.parquet"
    conversations.write_part(
        path, [Row("0", "p", "k", "d", "train", 0, 0, [1, 2], [3], "stop", 0.0, 1.0, "f")]
    )
    good = bytearray(path.read_bytes())
    good[at % len(good)] = byte
    for damaged in (data, bytes(good), bytes(good[: cut % len(good)])):
        path.write_bytes(damaged)
        survives(conversations.read_part, path)


@few
@given(header=trees, tail=st.binary(max_size=64), length=st.integers(0, 2**40))
def test_state_shards_with_any_header(tmp_path, header, tail, length):
    path = tmp_path / "shard-00000.safetensors"
    text = json.dumps(header).encode()
    for data in (struct.pack("<Q", len(text)) + text + tail, struct.pack("<Q", length) + text + tail, tail):
        path.write_bytes(data)
        survives(states.refs, tmp_path, [{"file": path.name, "sha256": file_hash(path)}])


@few
@given(about=trees)
def test_state_shards_with_any_about(tmp_path, about):
    from safetensors.torch import load_file, save_file

    path = tmp_path / "shard-00000.safetensors"
    states.write_shard(path, [random_row(6, 2, 1)], {})
    save_file(load_file(path), path, metadata={"about": json.dumps(about)})
    survives(states.refs, tmp_path, [{"file": path.name, "sha256": file_hash(path)}])


@few
@given(
    changes=st.dictionaries(
        st.sampled_from(
            [
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "vocab_size",
                "head_dim",
                "rms_norm_eps",
                "rope_theta",
                "rope_parameters",
                "text_config",
                "eos_token_id",
                "max_position_embeddings",
                "model_type",
                "num_key_value_heads",
                "intermediate_size",
            ]
        ),
        trees,
        max_size=4,
    )
)
def test_targets_with_any_config(tmp_path, target_folder, changes):
    for path in target_folder.iterdir():
        link = tmp_path / path.name
        if not link.exists() and path.name != "config.json":
            link.symlink_to(path)
    config = json.loads((target_folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    survives(targets.load, tmp_path)


@few
@given(tree=trees | st.fixed_dictionaries({"norms": trees, "aux_layers": trees, "stop_ids": trees}))
def test_contracts_of_any_tree(tmp_path, tree):
    path = tmp_path / "contract.json"
    path.write_text(json.dumps(tree))
    survives(contract.read, path)
