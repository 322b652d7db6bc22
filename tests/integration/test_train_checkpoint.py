"""Checkpoint files: whole or not there, and what is said when they are damaged."""

from __future__ import annotations

import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from recollect.errors import CheckpointError
from recollect.lab.train.checkpoint import (
    Checkpoint,
    checkpoint_path,
    environment,
    find_damage,
    list_checkpoints,
    load_checkpoint,
    refuse_damage,
    rng_state,
    write_checkpoint,
)
from recollect.lab.train.files import write_atomically
from recollect.lab.train.session import open_session
from training_runs import config, run

pytestmark = pytest.mark.integration


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        step=step,
        identity={"optim.steps": 9},
        model={"weight": torch.arange(10_000.0)},
        optimizer={"state": {}, "param_groups": []},
        rng=rng_state(),
        environment=environment(),
    )


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, checkpoint(3), keep=2)
    read = load_checkpoint(path)
    assert (read.step, read.identity) == (3, {"optim.steps": 9})
    assert torch.equal(read.model["weight"], torch.arange(10_000.0))
    assert torch.equal(read.rng["torch"], torch.get_rng_state())


def test_only_the_newest_are_kept_and_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "step_00000000.pt.partial").write_text("of a killed run")
    for step in range(1, 6):
        write_checkpoint(tmp_path, checkpoint(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000004.pt", "step_00000005.pt"]


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(5000.0, 5004.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_replace(path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, path)


def damage_omit(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    torch.save({name: value for name, value in content.items() if name != "rng"}, path)


def damage_foreign(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.txt", "some other zip file")


def damage_unsafe(path: Path) -> None:
    torch.save(Path, path)  # a class: not loadable with weights_only


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, r"got a truncated or foreign file of \d+ bytes, expected an intact checkpoint"),
        (damage_flip, r"got changed bytes in its record '.*data/0', expected an intact checkpoint"),
        (damage_empty, r"got a truncated or foreign file of 0 bytes"),
        (damage_replace, r"got format None instead of 1"),
        (damage_omit, r"got a file without rng"),
        (damage_unsafe, r"got a file with more than tensors and plain values in it"),
        (damage_foreign, r"got a file that torch cannot load"),
    ],
)
def test_damage_is_found_and_the_newest_older_good_one_named(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    for step in (1, 2, 3, 4):
        write_checkpoint(tmp_path, checkpoint(step), keep=4)
    damage_truncate(checkpoint_path(tmp_path, 3))
    damage(checkpoint_path(tmp_path, 4))
    with pytest.raises(CheckpointError, match=rf"step_00000004\.pt: {message}") as caught:
        refuse_damage(checkpoint_path(tmp_path, 4), find_damage(checkpoint_path(tmp_path, 4)))
    assert str(caught.value).endswith("Remove it to resume from the older step_00000002.pt.")


def test_damage_without_an_older_good_one(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, checkpoint(1), keep=1)
    damage_truncate(path)
    with pytest.raises(CheckpointError, match=r"No older one is intact: start a new run\."):
        refuse_damage(path, find_damage(path))


def test_run_resumes_after_the_damaged_file_is_removed(tmp_path: Path) -> None:
    run(tmp_path, checkpoint_every=3)
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    damage_truncate(newest)
    with pytest.raises(
        CheckpointError, match=r"step_00000006\.pt.*Remove it to resume from the older step_00000003\.pt"
    ):
        run(tmp_path, checkpoint_every=3, resume=True)
    newest.unlink()
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


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write(file: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, write)
    assert [(other.name, other.read_text()) for other in tmp_path.iterdir()] == [("file", "old")]


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(CheckpointError, match=r"step_00000001\.pt: cannot be written .* Older checkpoints are kept"):
        write_checkpoint(tmp_path / "checkpoints", checkpoint(1), keep=1)


def test_checkpoint_of_a_run_loads_with_weights_only(tmp_path: Path) -> None:
    session = open_session(config(tmp_path))
    session.save()
    content = torch.load(list_checkpoints(tmp_path / "run" / "checkpoints")[0], weights_only=True)
    assert content["identity"] == session.identity
    assert all(torch.equal(content["model"][name], value) for name, value in session.model.state_dict().items())
