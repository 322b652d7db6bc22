"""Files of a run folder: whole or not there, and of one run at a time."""

import os
from pathlib import Path
from typing import BinaryIO

import pytest

from recollect.errors import CheckpointError
from recollect.lab.train.files import only_run_in, write_atomically


def test_a_second_run_in_a_folder_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with only_run_in(folder):
        with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on .* is already training") as caught:
            with only_run_in(folder):
                pass
        assert str(folder) in str(caught.value)
    with only_run_in(folder):
        pass


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    def write_half(file: BinaryIO) -> None:
        file.write(b"half of")
        raise OSError("no space left")

    path = tmp_path / "plan.json"
    path.write_text("the old one")
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, write_half)
    assert path.read_text() == "the old one"
    assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]
