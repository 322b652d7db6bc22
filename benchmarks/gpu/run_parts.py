"""Run parts in this process. `scripts/gpu` starts it, reads what it prints, and stops it when its time is over."""

from __future__ import annotations

import argparse
import sys
import traceback
import warnings
from pathlib import Path

import torch
from rich.console import Console

from contest import reason
from gpu.part import Context, Part
from gpu.parts import PARTS
from recollect.lab.bench.race import keep_freed_memory
from recollect.measuring.device_memory import memory_bytes
from results_csv import machine_name


def run(part: Part, context: Context) -> str:
    """Run a part, and return its result; the lines around it tell the starting process where it begins and ends."""
    print(f"== part {part.name}: {part.what}", flush=True)
    result = "ok"
    num_bytes = memory_bytes(context.device)
    problem = part.problem(machine_name(str(context.device)), num_bytes / 2**30 if num_bytes else None)
    if problem is not None:
        print(f"finding: {problem}", flush=True)
        result = "skipped"
    else:
        try:
            print(f"finding: {part.run(context)}", flush=True)
        except KeyboardInterrupt:
            print("finding: interrupted; what it had measured by then is in its file", flush=True)
            result = "stopped"
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            print(f"finding: {reason(error)}", flush=True)
            result = "failed"
    print(f"== end {result}", flush=True)
    return result


def main() -> None:
    """Run the parts of the command line, one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--dry-run", action="store_true")
    flags = parser.parse_args()
    warnings.simplefilter("ignore")
    keep_freed_memory()
    device = torch.device(flags.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # the sizes of a dry run
    by_name = {part.name: part for part in PARTS}
    console = Console(width=None if sys.stdout.isatty() else 140)
    for name in flags.parts:
        context = Context(
            part=name,
            device=device,
            out=flags.out,
            is_dry_run=flags.dry_run,
            only=flags.only,
            seconds=flags.seconds,
            console=console,
        )
        run(by_name[name], context)


if __name__ == "__main__":
    main()
