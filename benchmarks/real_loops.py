"""Run training loops as people write them within budgets: does every step keep to them, and does training stay the same?

    python benchmarks/real_loops.py                        # all loops; each takes about half a minute on one core
    python benchmarks/real_loops.py --loops "DPO's pairs"

Each loop runs for 30 batches and more, with one line of recollect before it: without that line, at its leanest, half way
between, and near the least. The peak of every step is read from a meter that shares nothing with recollect's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allocator_meter import is_loaded, metered_environment
from flags import RESULTS, parse
from recollect.byte_format import format_bytes
from results_csv import Number, append


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What to run."""

    loops: tuple[str, ...] = ()
    """Names of loops; all if empty."""
    budgets: tuple[str, ...] = ("least", "half way", "near the least")
    """Names of budgets."""
    batches: int = 0
    """Batches of each loop; of each its own number if 0."""
    json: bool = False
    """Print a line of JSON for each row, and write no file."""
    out: Path = RESULTS
    """Folder of `real_loops.csv`."""


def main() -> None:
    """Print a table and append the numbers."""
    if sys.argv[1:2] == ["worker"]:
        for row in _run(sys.argv[2].split(","), int(sys.argv[3]), sys.argv[4:]):
            print(json.dumps(row), flush=True)
        return
    flags = parse(Flags, __doc__)
    numbers: list[Number] = []
    if not flags.json:
        print("| loop | budget | | plain | peak | predicted | recorded | slowdown | weights | |")
        print("|---|---|--:|--:|--:|--:|--:|--:|---|---|")
    for row in _rows(flags):
        if flags.json:
            print(json.dumps(row), flush=True)
            continue
        print(_line(row), flush=True)
        name = f"{row['loop']}, {row['budget']}"
        numbers += [Number(key.removesuffix("_bytes"), "B", name, row[key]) for key in row if key.endswith("_bytes")]
        numbers.append(Number("weights_equal", "1", name, int(row["weights_equal"])))
        numbers.append(Number("steps_over_budget_unsaid", "1", name, len(row["unsaid_overruns"])))
        numbers.append(Number("recorded", "1", name, row["num_recorded"]))
    if numbers:
        append(flags.out / "real_loops.csv", numbers, {"device": "cpu"})


def _rows(flags: Flags) -> Iterator[dict[str, Any]]:
    if is_loaded():
        yield from _run(flags.budgets, flags.batches, flags.loops)
        return
    with metered_environment() as environment:
        command = [sys.executable, __file__, "worker", ",".join(flags.budgets), str(flags.batches), *flags.loops]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            yield from map(json.loads, process.stdout)
        if process.returncode:
            raise RuntimeError(f"the loops ended with {process.returncode}")


def _line(row: dict[str, Any]) -> str:
    sizes = [format_bytes(row[key]) for key in ("budget_bytes", "plain_bytes", "peak_bytes", "predicted_bytes")]
    weights = "equal" if row["weights_equal"] else "DIFFERENT"
    over = f"OVER at {row['unsaid_overruns']}; " if row["unsaid_overruns"] else ""
    cells = [row["loop"], row["budget"], *sizes, f"{row['num_recorded']} of {row['num_batches']}"]
    return (
        "| "
        + " | ".join(
            [
                *cells,
                f"{row['slowdown']:.1%}",
                weights,
                over + row["said"].splitlines()[0][:120] if row["said"] else over,
            ]
        )
        + " |"
    )


def _run(budgets: Sequence[str], num_batches: int, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the loops, in a process that has the meter."""
    import torch
    import transformers

    from allocator_meter import AllocatorMeter
    from loops import courses, one_model, several_calls  # noqa: F401, they enter their loops
    from loops.loop import LOOPS
    from loops.within_budgets import rows

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    meter = AllocatorMeter()
    for name in names or LOOPS:
        for row in rows(LOOPS[name], meter, budgets, num_batches):
            yield row.fields()


if __name__ == "__main__":
    main()
