"""Checkpoints of one process: whole or not there, and what is said when they are damaged."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recollect.errors import CheckpointError
from recollect.lab.train import sharded_checkpoint
from recollect.lab.train.checkpoint import list_checkpoints
from recollect.lab.train.files import remove
from recollect.lab.train.session import open_session
from training_runs import config, run


def damage_truncate(path: Path) -> None:
    (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-1000])


def test_run_resumes_after_the_damaged_file_is_removed(tmp_path: Path) -> None:
    run(tmp_path, checkpoint_every=3)
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    damage_truncate(newest)
    with pytest.raises(CheckpointError, match="step_00000006: got .*Remove it to resume from the older step_00000003"):
        run(tmp_path, checkpoint_every=3, resume=True)
    remove(newest)
    assert [record.step for record in run(tmp_path, checkpoint_every=3, resume=True).records] == [4, 5, 6]


def test_killed_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    code = f"""
import os, pathlib, signal
from recollect.lab.train.files import write_atomically
def write(file):
    file.write(b"new, half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
write_atomically(pathlib.Path({str(path)!r}), write)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert path.read_text() == "old"


def test_unwritable_folder(tmp_path: Path) -> None:
    session = open_session(config(tmp_path))
    (tmp_path / "run" / "checkpoints").write_text("a file in the way")
    with pytest.raises(CheckpointError) as caught:
        session.save()
    assert str(caught.value) == (
        f"checkpoint {tmp_path}/run/checkpoints/step_00000000: cannot be written (Not a directory), expected a writable folder "
        "with free space. Older checkpoints are kept; free space or choose a different --run-dir."
    )


def test_an_interrupt_while_one_is_written_is_no_error_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path) -> int:
        raise KeyboardInterrupt

    session = open_session(config(tmp_path))
    monkeypatch.setattr(sharded_checkpoint, "checksum_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.save()
    assert not list_checkpoints(tmp_path / "run" / "checkpoints")
