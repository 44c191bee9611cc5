"""Shards are verified once, at once or beside training, and a wrong one ends it."""

import json
import os
import shutil

import pytest

from eyas import pipeline
from eyas.errors import ContractError
from eyas.rundir import read_json
from eyas.stores import checksums, states
from eyas.stores.checksums import Checksums


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the finished run, whose training is to be done again."""
    shutil.copytree(finished[1], tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def read(monkeypatch):
    """Names of the shards that were hashed."""
    names, real = [], states.hashed

    def hashed(path):
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(states, "hashed", hashed)
    return names


def corrupt(path):
    """Another state of one position, at the same size and time."""
    about = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def train(finished, folder):
    return pipeline.run(str(finished[0]), (), str(folder), first="train", last="train")


def test_a_shard_is_read_once_while_it_stays_as_it_was(run, read, tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "AT_ONCE", 0)
    listed = read_json(run / "states" / "manifest.json")["content"]
    names = [s["file"] for s in listed]
    remembered = tmp_path / "verified.json"
    Checksums(run / "states", listed, remembered).wait()
    assert sorted(read) == sorted(names) and json.loads(remembered.read_text()).keys() == set(names)
    Checksums(run / "states", listed, remembered).wait()
    assert len(read) == len(names)
    os.utime(run / "states" / names[0])
    Checksums(run / "states", listed, remembered).wait()
    assert read[len(names) :] == [names[0]]
    remembered.write_text("{broken")
    Checksums(run / "states", listed, remembered).wait()
    assert len(read) == 2 * len(names) + 1
    wrong = [
        {**listed[0], "sha256": "0" * 64},
        *listed[1:],
    ]  # another manifest: what was verified was another shard
    with pytest.raises(ContractError, match=f"{names[0]}: checksum .* where the manifest has 000000000000"):
        Checksums(run / "states", wrong, remembered).wait()


def test_small_states_leave_nothing_behind(run, tmp_path):
    """A training that is refused before its first step has left nothing, so that a mended recipe goes on."""
    listed = read_json(run / "states" / "manifest.json")["content"]
    assert Checksums(run / "states", listed, tmp_path / "verified.json").done
    assert not (tmp_path / "verified.json").exists()


def test_large_states_are_verified_beside_training(finished, run, read, monkeypatch, capsys):
    monkeypatch.setattr(checksums, "AT_ONCE", 0)
    train(finished, run)
    listed = read_json(run / "states" / "manifest.json")["content"]
    assert sorted(read) == sorted(s["file"] for s in listed)
    assert "are verified while training goes on" in capsys.readouterr().err
    assert (run / "train" / "verified.json").is_file()


def test_what_was_verified_before_a_kill_is_not_read_again(run, read, tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "AT_ONCE", 0)
    listed = read_json(run / "states" / "manifest.json")["content"]
    assert len(listed) > 1
    remembered = tmp_path / "verified.json"
    Checksums(run / "states", listed, remembered)._take()  # and then it was killed
    assert json.loads(remembered.read_text()).keys() == {listed[0]["file"]}
    read.clear()
    Checksums(run / "states", listed, remembered).wait()
    assert sorted(read) == sorted(s["file"] for s in listed[1:])


@pytest.mark.parametrize("at_once", [0, checksums.AT_ONCE])
def test_a_shard_that_changed_ends_training_unfinished(finished, run, monkeypatch, at_once):
    monkeypatch.setattr(checksums, "AT_ONCE", at_once)
    (shard, *_) = sorted((run / "states").glob("shard-*"))
    corrupt(shard)
    with pytest.raises(ContractError, match=rf"{shard.name}: checksum .*Extract again with --from extract"):
        train(finished, run)
    assert not (run / "train" / "manifest.json").is_file()
    assert (run / "train" / "steps.jsonl").is_file() == (at_once == 0)
