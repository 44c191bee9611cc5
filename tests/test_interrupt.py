import os
import signal
import subprocess
import sys
import time

import pytest

from eyas import interrupt
from eyas.cli import resume_command


def test_the_first_ctrl_c_waits_for_a_safe_place_and_the_second_does_not():
    with interrupt.patient():
        interrupt.safe_place()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.asked()
        with pytest.raises(KeyboardInterrupt):
            interrupt.safe_place()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert not interrupt.asked()


def test_what_to_type_leaves_out_from():
    assert (
        resume_command(["run", "a b.yaml", "--from", "train", "--set", "x=1"])
        == "eyas run 'a b.yaml' --set x=1"
    )
    assert resume_command(["run", "r", "--from=train"]) == "eyas run r"


def test_an_interrupted_run_exits_130_says_how_to_go_on_and_goes_on(recipe_file, tmp_path):
    folder = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "eyas",
        "run",
        str(recipe_file),
        "--run",
        str(folder),
        "--until",
        "extract",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (folder / "conversations" / "part-00000.parquet").is_file():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130, said
    assert "To go on: eyas run" in said and "Traceback" not in said
    assert not (folder / "states" / "manifest.json").is_file()
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
