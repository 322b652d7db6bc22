"""Small training runs for tests: a text, settings of milliseconds a step, the command line as a real process."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from forked_processes import LONGEST_S, ForkedProcess
from recollect.lab.train.config import DataFlags, RunFlags, StepFlags, TrainConfig
from recollect.lab.train.loop import train
from recollect.lab.train.model_flags import ModelFlags
from recollect.lab.train.optim_flags import OptimFlags
from recollect.lab.train.records import Outcome

QUIET = Console(quiet=True)


def write_text(folder: Path, *, num_words: int = 20_000) -> Path:
    words = ["the", "of", "gradient", "memory", "keeps", "every", "layer", "budget"]
    chosen = random.Random(0).choices(words, weights=range(len(words), 0, -1), k=num_words)
    path = folder / "text.txt"
    path.write_text(" ".join(chosen))
    return path


def config(folder: Path, **changes: Any) -> TrainConfig:
    """Settings of a tiny run in `folder`; `changes` go to whichever part has the flag."""
    parts: dict[str, Any] = {
        "model": (ModelFlags, {"size": "tiny"}),
        "data": (DataFlags, {"seq_length": 32}),
        "optim": (OptimFlags, {"steps": 6, "batch_size": 4, "warmup_steps": 2}),
        "step": (StepFlags, {"device": "cpu"}),
        "run": (RunFlags, {"run_dir": folder / "run", "validation_batches": 2}),
    }
    if "data" not in changes:
        text = folder / "text.txt"
        changes["data"] = (text if text.exists() else write_text(folder),)
    flags = {}
    for part, (kind, values) in parts.items():
        mine = {name: changes.pop(name) for name in list(changes) if name in kind.__dataclass_fields__}
        flags[part] = kind(**{**values, **mine})
    assert not changes, changes
    return TrainConfig(**flags)


def run(folder: Path, **changes: Any) -> Outcome:
    return train(config(folder, **changes), console=QUIET)


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step in metrics.jsonl; a step that is there twice is an error."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = {record["step"]: record["loss"] for record in records}
    assert len(found) == len(records)
    return found


def start(*args: object) -> ForkedProcess:
    return ForkedProcess("recollect", *args, COLUMNS="100")


def start_python(*args: object) -> subprocess.Popen[str]:
    """Start the command line as users do, which takes some seconds longer."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "recollect", *map(str, args)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_steps(process: subprocess.Popen[str] | ForkedProcess, run_dir: Path, steps: int) -> None:
    """Wait until metrics.jsonl holds `steps` lines."""
    path = run_dir / "metrics.jsonl"
    end_s = time.monotonic() + LONGEST_S
    while not path.exists() or path.read_bytes().count(b"\n") < steps:
        assert process.poll() is None, process.communicate()
        if time.monotonic() > end_s:
            # Of torchrun, so that it ends its own.
            process.terminate()
            raise AssertionError(f"no {steps} steps within {LONGEST_S} s: {process.communicate()}")
        time.sleep(0.002)


def kill_after(steps: int, run_dir: Path, *args: object) -> None:
    """Start a run and end it by SIGKILL once it has taken `steps` steps."""
    process = start(*args)
    wait_for_steps(process, run_dir, steps)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
