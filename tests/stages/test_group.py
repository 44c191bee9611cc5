"""Training by several processes: the same steps, one outcome, and no process that waits for a dead one."""

import json
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file

from eyas.errors import ContractError
from eyas.train import schedule
from eyas.train.group import Group

TWO = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "--",
    "eyas",
]
LONGER = ("--set", "train.epochs=25")


def lines(folder, name="steps"):
    return [json.loads(x) for x in (folder / "train" / f"{name}.jsonl").read_text().splitlines()]


def begin(recipe, folder, *more):
    return [*TWO, "train", str(recipe), "--run", str(folder), *more]


@pytest.fixture
def untrained(finished, tmp_path):
    """A copy of the finished run up to its states."""
    folder = tmp_path / "run"
    shutil.copytree(finished[1], folder)
    for name in ("train", "drafter"):
        shutil.rmtree(folder / name)
    return folder


def test_two_processes_train_what_one_trains(finished, untrained):
    done = subprocess.run(begin(finished[0], untrained), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 processes, each with a part of every step" in done.stderr
    assert done.stderr.count("train: done") == 1  # one speaks
    for one, two in zip(lines(finished[1]), lines(untrained), strict=True):
        assert one["pairs"] == two["pairs"]
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-3)
        assert one["accuracy_0"] == pytest.approx(two["accuracy_0"], abs=0.02)
    weights = [load_file(f / "drafter" / "best" / "model.safetensors") for f in (finished[1], untrained)]
    assert weights[0].keys() == weights[1].keys()
    for name, w in weights[0].items():
        torch.testing.assert_close(w.float(), weights[1][name].float(), rtol=0.05, atol=2e-3)
    for one, two in zip(lines(finished[1], "evals"), lines(untrained, "evals"), strict=True):
        assert len(one["walks"]) == len(two["walks"])
        assert one["tau"]["1"]["value"] == pytest.approx(two["tau"]["1"]["value"], abs=0.05)
    again = subprocess.run(begin(finished[0], untrained), capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and "train: done already" in again.stderr, again.stderr


def workers(launched):
    found = psutil.Process(launched.pid).children(recursive=True)
    return sorted((p for p in found if "eyas" in p.cmdline() and "train" in p.cmdline()), key=lambda p: p.pid)


def in_the_third_epoch(recipe, folder):
    """Two processes that are training."""
    launched = subprocess.Popen(
        begin(recipe, folder, *LONGER), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 120
    while time.monotonic() < end and not (folder / "drafter" / "epoch-2" / "metrics.json").is_file():
        time.sleep(0.05)
    return launched


def test_a_process_that_dies_ends_all_and_one_alone_goes_on(finished, untrained):
    launched = in_the_third_epoch(finished[0], untrained)
    both = workers(launched)
    assert len(both) == 2
    both[1].send_signal(signal.SIGKILL)
    _, said = launched.communicate(timeout=120)
    assert launched.returncode != 0
    assert "another process of this training ended" in said or "SIGKILL" in said, said
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in both)
    alone = [sys.executable, "-m", "eyas", "train", str(finished[0]), "--run", str(untrained), *LONGER]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "resuming at step" in done.stderr and "2 trained before, now 1" in done.stderr
    assert [e["epoch"] for e in lines(untrained, "evals")] == list(range(1, 26))


def test_asked_to_stop_all_stop_after_the_same_step_and_go_on_from_there(finished, untrained):
    launched = in_the_third_epoch(finished[0], untrained)
    workers(launched)[1].send_signal(
        signal.SIGINT
    )  # to one of them; the other learns it from the step's figures
    _, said = launched.communicate(timeout=120)
    assert said.count("interrupted; what was finished is kept") == 2 and "another process" not in said, said
    kept = lines(untrained)
    done = subprocess.run(begin(finished[0], untrained, *LONGER), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"resuming at step {len(kept)} of" in done.stderr
    assert lines(untrained)[: len(kept)] == kept


def test_processes_that_would_not_train_the_same_stop_before_the_first_step(monkeypatch):
    group = Group(1, 3)
    mine = {"steps": 4, "rows": "a"}
    monkeypatch.setattr(group, "gather", lambda facts: [mine, mine, {"steps": 4, "rows": "b"}])
    with pytest.raises(ContractError, match=r"process 2 of 3 has other rows \(b\) than process 0 \(a\)"):
        group.agree(mine)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 5, 7])
def test_what_was_dealt_out_comes_back_in_order(world, count, monkeypatch):
    groups = [Group(rank, world) for rank in range(world)]
    parts = [g.deal(range(count)) for g in groups]
    monkeypatch.setattr(groups[0], "gather", lambda _: parts)
    assert groups[0].collect(parts[0]) == list(range(count))


@pytest.mark.parametrize("verb", ["run", "bench"])
def test_other_verbs_refuse_several_processes(finished, untrained, verb):
    done = subprocess.run(
        [*TWO, verb, str(finished[0]), "--run", str(untrained)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert f"eyas {verb} works in one process; only `eyas train` can be launched by torchrun." in done.stderr


def test_a_steps_rows_are_dealt_out_by_length():
    lengths = [50, 10, 40, 20, 30]
    dealt = schedule.shares(range(5), lengths, 2)
    assert sorted(i for part in dealt for i in part) == [0, 1, 2, 3, 4]
    assert [sum(lengths[i] for i in part) for part in dealt] == [80, 70]
    assert schedule.shares([3, 1], lengths, 1) == [[3, 1]]
    assert schedule.shares([3], lengths, 2) == [[3], []]  # one has none, and takes part all the same
