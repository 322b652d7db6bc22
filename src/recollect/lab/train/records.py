"""Records of a run, one per step, the baseline without recompute, and the outcome; and where steps are logged.

Logs are a file with one JSON object per step, TensorBoard events, and a live line on a terminal or plain lines elsewhere.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from recollect.byte_format import format_bytes
from recollect.errors import CheckpointError
from recollect.extras import needed
from recollect.lab.train.files import write_text
from recollect.printing import print_line
from recollect.warning import warn_user

_PLAIN_LINES = 20  # readable in the log of a whole run
_BAR_AND_TIME = 4 + len("0:00:00") + 3  # columns at least: the shortest bar, the time that remains, the gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step."""

    step: int
    """Steps completed, including this one."""
    loss: float
    """Mean cross entropy of the step's tokens, in nats."""
    learning_rate: float
    grad_norm: float
    """Norm of the gradient before clipping; nan if clipping is off."""
    step_s: float
    """Step time in seconds; measuring the peak on a CPU adds to it."""
    tokens_per_s: float
    validation_loss: float | None = None
    peak_bytes: int | None = None
    """Measured peak of the whole step, if measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The step without recompute: its predicted peak, and if requested its measured peak and fastest time."""

    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    measured_step_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished (or stopped) run."""

    records: tuple[StepRecord, ...]
    """Steps of this process, oldest first; none if a finished run was resumed."""
    baseline: Baseline
    budget_bytes: int | None
    predicted_peak_bytes: int | None
    predicted_slowdown: float | None
    """Added time of the plan as a fraction of the step without recompute; None without a budget."""
    step_s: float | None
    """Fastest step without a measured peak, as other programs can only slow steps down; None if there is none."""
    folder: str
    total_steps: int
    excess_reason: str = ""
    """Why a step may take more than predicted, with advice; none for one process."""

    @property
    def measured_peak_bytes(self) -> int | None:
        return max((record.peak_bytes for record in self.records if record.peak_bytes is not None), default=None)


class Log:
    """A destination of a run's records."""

    def note(self, text: str) -> None:
        """Take a line of text about the run; do nothing where only numbers go."""

    def write(self, record: StepRecord) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Finish; called once, also after an error."""


class MetricsFile(Log):
    """Append one JSON object per step to `path`.

    Lines after `first_step` are removed first: a killed run may have written steps after its last checkpoint; the resumed
    run repeats them. Floats read back to the same bits. A line that is not a record raises CheckpointError; half of one at the
    end, as a killed process leaves it, is removed with a warning.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        if path.exists():
            kept = [line for step, line in _records_in(path) if step <= first_step]
            write_text(path, "".join(kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        """Append one line and flush it: a killed process loses none."""
        fields = {name: value for name, value in dataclasses.asdict(record).items() if value is not None}
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardLog(Log):
    """Write each number of a record as a TensorBoard scalar, and some more beside each measured peak."""

    def __init__(self, folder: Path, *, first_step: int, beside_peak: Mapping[str, float]) -> None:
        self._beside_peak = beside_peak
        with needed("tensorboard", by="--tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        # The resumed run repeats the steps after the checkpoint.
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step + 1)

    def write(self, record: StepRecord) -> None:
        beside = {} if record.peak_bytes is None else self._beside_peak
        for name, value in {**dataclasses.asdict(record), **beside}.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._writer.close()


def _records_in(path: Path) -> Iterator[tuple[int, str]]:
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


class LiveDisplay(Log):
    """Show loss, speed and peak in one line that is updated; notes scroll above it."""

    def __init__(self, console: Console, *, total_steps: int, first_step: int, budget_bytes: int | None) -> None:
        self._total = total_steps
        self._budget_bytes = budget_bytes
        self._peak_bytes = 0
        self._validation_loss: float | None = None
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),  # the space that the others leave
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("starting", total=total_steps, completed=first_step)
        self._progress.start()

    def note(self, text: str) -> None:
        print_line(self._progress.console, text)

    def write(self, record: StepRecord) -> None:
        self._peak_bytes = max(record.peak_bytes or 0, self._peak_bytes)
        if record.validation_loss is not None:
            self._validation_loss = record.validation_loss
        shown = dataclasses.replace(record, validation_loss=self._validation_loss, peak_bytes=self._peak_bytes or None)
        columns = self._progress.console.width - len(f"step {self._total}/{self._total}") - _BAR_AND_TIME
        text = describe(shown, self._budget_bytes, columns=columns)
        self._progress.update(self._task, completed=record.step, description=text)

    def close(self) -> None:
        self._progress.stop()


class PlainDisplay(Log):
    """Print about twenty lines per run, or one every `every` steps, and one for each validation or measured peak."""

    def __init__(
        self, console: Console, *, total_steps: int, budget_bytes: int | None, every: int | None = None
    ) -> None:
        self._console = console
        self._total_steps = total_steps
        self._every = every or max(1, total_steps // _PLAIN_LINES)
        self._budget_bytes = budget_bytes

    def note(self, text: str) -> None:
        print_line(self._console, text)

    def write(self, record: StepRecord) -> None:
        is_rare = record.validation_loss is not None or record.peak_bytes is not None
        if is_rare or record.step % self._every == 0 or record.step == self._total_steps:
            self.note(f"step {record.step}/{self._total_steps}  {describe(record, self._budget_bytes)}")


def describe(record: StepRecord, budget_bytes: int | None, *, columns: int | None = None) -> str:
    """Return loss, speed and peak of a step as one line of text; where there is little room, the least important are left out.

    Example:
        >>> record = StepRecord(step=1, loss=2.5, learning_rate=1e-3, grad_norm=1.0, step_s=0.5, tokens_per_s=2048.0)
        >>> record = dataclasses.replace(record, validation_loss=2.75, peak_bytes=1 << 20)
        >>> describe(record, 2 << 20)
        'loss 2.5000  validation 2.7500  2,048 tokens/s  measured peak 1.0 MiB of 2.0 MiB'
        >>> describe(record, None, columns=60)
        'loss 2.5000  validation 2.7500  measured peak 1.0 MiB'
    """
    parts = {"loss": f"loss {record.loss:.4f}"}
    if record.validation_loss is not None:
        parts["validation"] = f"validation {record.validation_loss:.4f}"
    parts["speed"] = f"{record.tokens_per_s:,.0f} tokens/s"
    if record.peak_bytes is not None:
        of_budget = "" if budget_bytes is None else f" of {format_bytes(budget_bytes)}"
        parts["peak"] = f"measured peak {format_bytes(record.peak_bytes)}{of_budget}"
    for least in ("speed", "validation", "peak"):
        if columns is None or len("  ".join(parts.values())) <= columns:
            break
        parts.pop(least, None)
    return "  ".join(parts.values())
