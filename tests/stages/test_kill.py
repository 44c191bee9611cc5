"""kill -9 twenty times, at moments drawn at random over the whole life: the end equals an uninterrupted run."""

import random
import signal
import subprocess
import sys
import time

from eyas.rundir import read_json
from tests.stages.test_pipeline import outcome

KILLS = 20


def test_twenty_kills_at_random_moments_change_nothing(recipe_file, finished, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "eyas", "run", str(recipe_file), "--run", str(folder)]
    rng = random.Random(7)
    killed = 0
    while killed < KILLS:
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        began = time.monotonic()
        while not (folder / "run.json").is_file() and process.poll() is None:
            time.sleep(0.01)
        wait = rng.uniform(0.5, 9.0)  # starting up takes some seconds; the stages of this target take as long
        while time.monotonic() - began < wait and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed += 1
        if (folder / "verdict.json").is_file():
            redo = rng.choice(["generate", "extract", "train", "bench"])
            command_again = [*command, "--from", redo]
            process = subprocess.Popen(command_again, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            time.sleep(rng.uniform(4.0, 9.0))
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert outcome(folder) == outcome(finished[1])
    assert read_json(folder / "check.json") == read_json(finished[1] / "check.json")
    leftovers = [p for p in folder.rglob(".*") if p.name != ".lock"]
    assert not leftovers, "temporary files of killed runs are swept"
