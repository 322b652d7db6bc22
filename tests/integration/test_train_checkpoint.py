"""Checkpoints that cannot be written: what is said, and that none is there."""

from pathlib import Path

import pytest

from recollect.errors import CheckpointError
from recollect.lab.train import sharded_checkpoint
from recollect.lab.train.checkpoint import list_checkpoints
from recollect.lab.train.session import open_session
from training_runs import config


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
