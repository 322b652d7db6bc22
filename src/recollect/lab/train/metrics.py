"""Write the records of a run: one JSON object per step, and TensorBoard events."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recollect.errors import CheckpointError
from recollect.extras import needed
from recollect.lab.train.files import write_text
from recollect.lab.train.records import StepRecord
from recollect.warning import warn_user


class MetricsFile:
    """Append one JSON object per step to `path`.

    Args:
        path: the file, created if missing.
        first_step: steps completed before.

    Lines after `first_step` are removed first: a killed run may have written steps after its last checkpoint, which the resumed
    run repeats. Floats read back to the same bits.

    Raises:
        CheckpointError: a line of the file is no record.

    Warns:
        UserWarning: the last line is half of one, as a killed process leaves it, and is removed.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        if path.exists():
            kept = [line for step, line in _records_in(path) if step <= first_step]
            write_text(path, "".join(kept))
        self._file = path.open("a", encoding="utf-8")

    def note(self, text: str) -> None:
        """Do nothing: the file holds only numbers."""

    def write(self, record: StepRecord) -> None:
        """Append one line and flush it, so that a killed process loses none."""
        fields = {name: value for name, value in dataclasses.asdict(record).items() if value is not None}
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardLog:
    """Write each number of a record as a TensorBoard scalar.

    Args:
        folder: folder of the event files.
        first_step: steps completed before; events of later steps are removed.

    Raises:
        MissingPackageError: the package `tensorboard` is not installed.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        with needed("tensorboard", by="--tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        # The resumed run repeats the steps after the checkpoint.
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step + 1)

    def note(self, text: str) -> None:
        """Do nothing: events hold only numbers."""

    def write(self, record: StepRecord) -> None:
        """Add the record's numbers."""
        for name, value in dataclasses.asdict(record).items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def _records_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the step of each line, and the line."""
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError, IndexError):
            step = None
        if isinstance(step, int) and step > 0:
            yield step, line.decode().rstrip() + "\n"
        elif line.endswith(b"\n"):
            raise CheckpointError(
                f'{path}: line {number} is {line[:40]!r}, expected a JSON object with "step", from 1. Remove the line, or move '
                "the file away: the run goes on either way, and only what the file said of earlier steps is lost."
            )
        else:
            warn_user(f"{path}: line {number} is half of one, as a killed process leaves it, and is removed.")
