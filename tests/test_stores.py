import pytest
import torch

from eyas.drafter.batch import pack
from eyas.errors import ContractError
from eyas.rundir import file_hash
from eyas.stores import conversations, states
from eyas.stores.conversations import Row
from tests.conftest import random_row


def test_conversations_come_back_as_written(tmp_path):
    rows = [
        Row(f"{i}", f"p{i}", "k", "d", "train", 0, 0, [1, 2], [3 + i], "stop", 0.8, 1.0, "f")
        for i in range(3)
    ]
    conversations.write_part(tmp_path / "part-00000.parquet", rows[:2])
    conversations.write_part(tmp_path / "part-00001.parquet", rows[2:])
    assert list(conversations.read(tmp_path)) == rows
    assert rows[0].ids == [1, 2, 3]


def test_a_torn_part_is_refused(tmp_path):
    path = tmp_path / "part-00000.parquet"
    conversations.write_part(path, [Row("0", "p", "k", "d", "train", 0, 0, [1], [2], "stop", 0.0, 1.0, "f")])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ContractError, match="part-00000"):
        list(conversations.read(tmp_path))


def test_a_part_of_an_older_version_is_refused_with_what_it_lacks(tmp_path):
    import pyarrow.parquet as pq

    path = tmp_path / "part-00000.parquet"
    conversations.write_part(path, [Row("0", "p", "k", "d", "train", 0, 0, [1], [2], "stop", 0.0, 1.0, "f")])
    pq.write_table(pq.read_table(path).drop_columns(["prompt_key"]), path)
    with pytest.raises(ContractError, match="no column prompt_key"):
        conversations.read_part(path)


def test_states_come_back_bitwise_with_their_rows(tmp_path):
    rows = [random_row(9, 3, 1), random_row(5, 2, 2)]
    states.write_shard(tmp_path / "s.safetensors", rows, {"positions": 14})
    shard = {"file": "s.safetensors", "sha256": file_hash(tmp_path / "s.safetensors")}
    back = [ref.load() for ref in states.refs(tmp_path, [shard])]
    for a, b in zip(rows, back, strict=True):
        assert (a.row_id, a.start, len(a)) == (b.row_id, b.start, len(b))
        assert (
            torch.equal(a.ids_T, b.ids_T)
            and torch.equal(a.aux_TLD, b.aux_TLD)
            and torch.equal(a.last_SD[a.start - 1 :], b.last_SD)
        )
    assert states.read_checks(tmp_path / "s.safetensors") == {"positions": 14}


def test_fp8_keeps_a_state_within_its_precision_and_says_how_much_is_lost(tmp_path):
    rows = [random_row(9, 3, 1), random_row(5, 2, 2)]
    rows[0].kept_TLD[4] *= 1e4  # a token whose states are large must not cost the others
    rows[1].kept_TLD[0] = 0
    states.write_shard(tmp_path / "s.safetensors", rows, {}, fp8=True)
    shard = {"file": "s.safetensors", "sha256": file_hash(tmp_path / "s.safetensors")}
    refs = states.refs(tmp_path, [shard])
    for a, b in zip(rows, [ref.load() for ref in refs], strict=True):
        assert b.kept_TLD.dtype == torch.float8_e4m3fn and b.aux_TLD.dtype == torch.bfloat16
        wanted = a.kept_TLD.float()
        most = wanted.abs().amax(-1, keepdim=True)
        assert ((b.aux_TLD.float() - wanted).abs() <= wanted.abs() / 14 + most / 2**17).all()
        assert torch.equal(b.last_SD, a.last_SD[a.start - 1 :])
    lost = states.round_trip(tmp_path, [shard])
    assert lost and all(0.005 < x < 0.05 for x in lost)
    whole = pack([ref.load() for ref in refs])
    assert torch.equal(whole.key_aux_KLD, torch.cat([ref.load().aux_TLD[:-2] for ref in refs]))
    assert states.bytes_per_token(3, 576, "fp8", 2) == 3 * (576 + 4) + 2 * 576 + states.ID_BYTES


def test_rows_loaded_at_once_are_those_loaded_one_by_one(tmp_path):
    shards = []
    for i in range(2):
        path = tmp_path / f"{i}.safetensors"
        states.write_shard(path, [random_row(9, 3, 2 * i), random_row(5, 2, 2 * i + 1)], {})
        shards.append({"file": path.name, "sha256": file_hash(path)})
    wanted = states.refs(tmp_path, shards)[1:]
    for ref, row in zip(wanted, states.load_all(wanted, "cpu"), strict=True):
        one = ref.load()
        assert (row.row_id, row.start, row.load()) == (one.row_id, one.start, row)
        for name in ("ids_T", "aux_TLD", "last_SD", "top1_T"):
            assert torch.equal(getattr(row, name), getattr(one, name))


def test_a_truncated_or_missing_shard_is_refused(tmp_path):
    path = tmp_path / "s.safetensors"
    states.write_shard(path, [random_row(9, 3, 1)], {})
    path.write_bytes(path.read_bytes()[:-10])
    torn = {"file": path.name, "sha256": file_hash(path)}
    with pytest.raises(ContractError, match="not a readable states shard"):
        states.refs(tmp_path, [torn])
    with pytest.raises(ContractError, match="checksum"):
        states.verified(tmp_path, [{"file": "s.safetensors", "sha256": "0"}])
    with pytest.raises(ContractError, match="is missing"):
        states.refs(tmp_path, [{"file": "t.safetensors", "sha256": "0"}])


def test_bytes_of_a_token():
    """Kimi-K2.5: four states of 7168 in bf16 are 57,344 bytes; eyas adds an id and a top-1 of 4 bytes each."""
    assert states.bytes_per_token(3, 7168, "bfloat16", 2) - states.ID_BYTES == 57_344
