"""Each tool's own checkpointing against recollect at the same measured peak, in the tool's own loop.

    python benchmarks/tools.py                         # all tools; about a minute for each round of one, on a core of its own
    python benchmarks/tools.py --rounds 5 --tools "HF Trainer" Lightning

Each tool trains the same model for 30 steps: plainly, with its own checkpointing, and with recollect within the peak that was
measured for that. The three run in turns, a process for each tool, on one thread. Peaks are read from a meter that shares
nothing with recollect's; times are processor time of this process, so that other programs count little. Of each round the ratio
of median steps counts; the table has the median of these ratios, and the least and the most of that against the tool's own.
Where a plan does not fit (`BudgetWarning`), standard error says so.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allocator_meter import AllocatorMeter, metered_environment
from flags import RESULTS, parse
from recollect.byte_format import format_bytes
from results_csv import Number, append

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

NAMES = (
    *("bare loop", "Accelerate", "HF Trainer", "PEFT LoRA", "TRL SFT", "Lightning"),
    *("DeepSpeed", "diffusers UNet", "diffusers DiT", "torchtitan full", "torchtitan selective"),
)
# The first is recorded, and the next ones warm up.
_NUM_SKIPPED = 3
# Freed memory stays with the process: returning it costs more than recompute does.
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_MMAP_MAX_": "0"}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What to run."""

    tools: tuple[str, ...] = NAMES
    """Names of tools."""
    rounds: int = 3
    """Trainings of each kind, in turns."""
    out: Path = RESULTS
    """Folder of `tools.csv`."""


def main() -> None:
    """Print a table and append the numbers."""
    if sys.argv[1:2] == ["worker"]:
        _work(sys.argv[2], int(sys.argv[3]))
        return
    flags = parse(Flags, __doc__)
    print("| tool | version | plain | its checkpointing | | recollect | | time against its own | over | weights |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|---|", flush=True)
    numbers: list[Number] = []
    for name in flags.tools:
        with metered_environment() as environment:
            command = [sys.executable, "-W", "ignore", __file__, "worker", name, str(flags.rounds)]
            done = subprocess.run(command, env={**environment, **_MALLOC}, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"| {name} | did not run: {done.stderr.strip().splitlines()[-1]} |", flush=True)
            continue
        for line in done.stderr.splitlines():
            if "BudgetWarning" in line:
                print(f"{name}: {line.partition('BudgetWarning: ')[2]}", file=sys.stderr)
        row = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"tool"')))
        print(_line(row), flush=True)
        numbers += [
            Number(key, "B" if key.endswith("bytes") else "1", name, row[key])
            for key in row
            if key not in ("tool", "version")
        ]
    if numbers:
        append(flags.out / "tools.csv", numbers, {"device": "cpu", "rounds": flags.rounds})


def _line(row: dict[str, Any]) -> str:
    plain, own, ours = (format_bytes(row[f"{key}_bytes"]) for key in ("plain", "own", "ours"))
    against, least, most = (row[f"ours_to_own{end}"] - 1 for end in ("", "_least", "_most"))
    spread = f" ({least:+.1%} to {most:+.1%})" if least != most else ""
    times = (f"{row['own_slowdown']:+.1%}", ours, f"{row['ours_slowdown']:+.1%}", f"{against:+.1%}{spread}")
    weights = "equal" if row["weights_equal"] else "DIFFERENT"
    cells = (row["tool"], row["version"], plain, own, *times, str(row["steps_over"]), weights)
    return f"| {' | '.join(cells)} |"


def _work(name: str, rounds: int) -> None:
    """Run one tool, and print a line of JSON."""
    import torch

    from metered_trainers import StepPeaks, digest_of
    from recollect.errors import BudgetTooSmallError, BudgetWarning
    from tool_loops import TOOLS

    class Steps(StepPeaks):
        """Times the steps, too."""

        def __init__(self, meter: AllocatorMeter) -> None:
            self.seconds: list[float] = []
            super().__init__(meter)

        def begin(self) -> None:
            super().begin()
            self._started = time.process_time()

        def end(self) -> None:
            self.seconds.append(time.process_time() - self._started)
            super().end()

        @property
        def step_s(self) -> float:
            return statistics.median(self.seconds[_NUM_SKIPPED:])

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", BudgetWarning)
    meter = AllocatorMeter()
    tool = TOOLS[name]
    peaks: dict[str, int] = {}
    digests: dict[str, str] = {}
    seconds: dict[str, list[float]] = {"plain": [], "own": [], "ours": []}
    over = budget_bytes = 0
    for _ in range(rounds):
        for way, times in seconds.items():
            steps = Steps(meter)
            least_bytes = 0
            try:
                budget_bytes = max(budget_bytes, peaks.get("own", 0))
                model = tool.train(budget_bytes if way == "ours" else way, steps)
            except BudgetTooSmallError as error:
                least_bytes = error.least_peak_bytes
            if least_bytes:
                # Out of the handler, where the error still holds the model of the first attempt.
                budget_bytes = least_bytes
                steps = Steps(meter)
                model = tool.train(least_bytes, steps)
            digests[way] = digest_of(model)
            peaks[way] = max(steps.bytes) if way != "own" else max(*steps.bytes, peaks.get("own", 0))
            times.append(steps.step_s)
            over += sum(nbytes > budget_bytes for nbytes in steps.bytes) if way == "ours" else 0
            del model

    def ratios(one: str, other: str) -> list[float]:
        return [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]

    against = ratios("ours", "own")
    row = {
        "tool": name,
        "version": importlib.metadata.version(tool.package),
        **{f"{way}_bytes": nbytes for way, nbytes in peaks.items()},
        "budget_bytes": budget_bytes,
        "plain_s": statistics.median(seconds["plain"]),
        "own_slowdown": statistics.median(ratios("own", "plain")) - 1,
        "ours_slowdown": statistics.median(ratios("ours", "plain")) - 1,
        "ours_to_own": statistics.median(against),
        "ours_to_own_least": min(against),
        "ours_to_own_most": max(against),
        "steps_over": over,
        "weights_equal": int(digests["plain"] == digests["ours"]),
    }
    print(json.dumps(row), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
