"""Does training in several processes survive kill -9, and go on as if nothing had happened?

Trains a tiny model in four processes (tensor and sequence parallel, FSDP2, dropout), unbroken; the same again with one process
killed, then all of them, each resumed on the same layout; and from the last checkpoint before the kill, without dropout, on
three other layouts. Then measures what a step pays for a checkpoint. Run it by hand:

    python benchmarks/kill_and_resume.py
    python benchmarks/kill_and_resume.py --steps 40 --out kills.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RANKS = 4
SPREAD = ("--tensor-model-parallel-size", 2, "--sequence-parallel", "--use-torch-fsdp2")
OTHERS: dict[str, tuple[int, tuple[object, ...]]] = {
    "4 processes, replicas": (4, ()),
    "2 processes, tensor parallel": (2, SPREAD[:2]),
    "1 process": (1, ()),
}
LIMIT_S = 900


def command(ranks: int, *words: object) -> list[str]:
    """Return how some processes are started."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, "-W", "ignore", *(launcher if ranks > 1 else []), *map(str, words)]


def start(ranks: int, *words: object) -> subprocess.Popen[str]:
    """Start some processes, in a session of their own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "100"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    return subprocess.Popen(
        command(ranks, *words),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


class Runs:
    """Trainings of one kind in a folder.

    Args:
        folder: for data and runs.
        steps: of a whole run.
        every: steps between checkpoints.
    """

    def __init__(self, folder: Path, steps: int, every: int) -> None:
        self.folder, self.steps, self.every = folder, steps, every
        words = "the of gradient memory keeps every layer budget".split()
        (folder / "text.txt").write_text(" ".join(words[i * i % 7 % 8] for i in range(20_000)))

    def start(self, name: str, ranks: int, layout: Sequence[object], *more: object) -> subprocess.Popen[str]:
        """Start a run, or go on with it."""
        sizes = ("--size", "tiny", "--seq-length", 32, "--batch-size", 1, "--accumulation", 4, "--steps", self.steps)
        run = ("--data", self.folder / "text.txt", "--run-dir", self.folder / name, "--checkpoint-every", self.every)
        return start(ranks, "-m", "recollect", "train", *sizes, *run, "--validate-every", 0, *layout, *more)

    def finished(self, name: str, ranks: int, layout: Sequence[object], *more: object) -> dict[int, float]:
        """Train to the end, and return the loss of each step."""
        process = self.start(name, ranks, layout, *more)
        _, errors = process.communicate(timeout=LIMIT_S)
        if process.returncode:
            raise SystemExit(f"{name}: {errors}")
        return self.losses(name)

    def killed(self, name: str, at: int, *more: object, only: int | None = None) -> dict[str, Any]:
        """Train until after a step, then kill one rank or everything; return what is left, and how the others end."""
        process = self.start(name, RANKS, SPREAD, *more)
        while not self.losses(name) or max(self.losses(name)) < at:
            if process.poll() is not None:
                raise SystemExit(f"{name}: {process.communicate()[1]}")
            time.sleep(0.02)
        for rank, number in workers(process).items():
            if only is None or rank == only:
                os.kill(number, signal.SIGKILL)
        if only is None:
            process.kill()
        begin = time.perf_counter()
        _, errors = process.communicate(timeout=60)
        seconds = time.perf_counter() - begin
        names = sorted(path.name for path in (self.folder / name / "checkpoints").iterdir())
        said = f"rank {only} of {RANKS} has ended without a word" in " ".join(errors.split())
        return {"after step": max(self.losses(name)), "others ended in s": seconds, "named": said, "left": names}

    def losses(self, name: str) -> dict[int, float]:
        """Return the loss of each step so far."""
        path = self.folder / name / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        rows = [json.loads(line) for line in lines]
        return {row["step"]: row["loss"] for row in rows}

    def copied(self, name: str, source: str, step: int) -> None:
        """Copy a run as it was after one of its checkpoints."""
        shutil.copytree(self.folder / source, self.folder / name)
        for path in (self.folder / name / "checkpoints").iterdir():
            if path.name != f"step_{step:08d}":
                shutil.rmtree(path)


def workers(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """Return the process ids that torchrun started, by rank."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    found = {}
    for child in map(int, children):
        for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                found[int(entry.removeprefix(b"RANK="))] = child
    return found


def kills(runs: Runs) -> list[dict[str, Any]]:
    """Kill one process, then all, and resume on the same layout."""
    dropout = ("--hidden-dropout", 0.1)
    unbroken = runs.finished("unbroken", RANKS, SPREAD, *dropout)
    rows = []
    for what, only, part in (("rank 2", 2, 0.35), ("all processes", None, 0.65)):
        more = (*dropout, *([] if not rows else ["--resume"]))
        rows.append({"killed": what, **runs.killed("killed", int(part * runs.steps), *more, only=only)})
    resumed = runs.finished("killed", RANKS, SPREAD, *dropout, "--resume")
    equal = sum(resumed.get(step) == loss for step, loss in unbroken.items())
    return [*rows, {"killed": "never again", "equal losses": equal, "of": len(unbroken)}]


def layouts(runs: Runs) -> list[dict[str, Any]]:
    """Resume in the middle on other layouts."""
    middle = runs.steps // 2 // runs.every * runs.every
    unbroken = runs.finished("plain", RANKS, SPREAD, "--keep-checkpoints", 1000)
    rows = []
    for name, (ranks, layout) in OTHERS.items():
        folder = name.replace(" ", "_").replace(",", "")
        runs.copied(folder, "plain", middle)
        found = runs.finished(folder, ranks, layout, "--resume")
        off = [abs(found[step] / unbroken[step] - 1) for step in range(middle + 1, runs.steps + 1)]
        rows.append({"layout": name, "first loss off by": off[0], "median": statistics.median(off), "most": max(off)})
    return rows


def cost(folder: Path) -> dict[str, Any]:
    """Measure in four processes what a step pays for a checkpoint."""
    path = folder / "cost.json"
    process = start(RANKS, ROOT / "benchmarks/kill_and_resume.py", "--cost-of", folder)
    _, errors = process.communicate(timeout=LIMIT_S)
    if process.returncode:
        raise SystemExit(errors)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def measure_cost(folder: Path) -> None:
    """Be one of the processes of `cost`."""
    import torch
    import torch.distributed as dist

    from recollect.lab.train import config as flags
    from recollect.lab.train.processes import joined_processes
    from recollect.lab.train.session import open_session

    torch.set_num_threads(1)
    config = flags.TrainConfig(
        model=flags.ModelFlags(size="demo"),
        data=flags.DataFlags(data=(folder / "text.txt",), seq_length=64),
        optim=flags.OptimFlags(batch_size=1, accumulation=2),
        step=flags.StepFlags(device="cpu"),
        run=flags.RunFlags(run_dir=folder / "cost"),
        parallel=flags.ProcessFlags(tensor_model_parallel_size=2, sequence_parallel=True, use_torch_fsdp2=True),
    )
    rows: list[dict[str, float]] = []
    with joined_processes(config) as processes:
        session = open_session(config, processes)
        session.seed()

        def step() -> float:
            dist.barrier()
            begin = time.perf_counter()
            session.trained.step(list(session.batches(session.step)), clip_norm=1.0)
            session.step += 1
            return time.perf_counter() - begin

        step()
        for _ in range(7):
            row = {"plain step": statistics.median(step() for _ in range(3))}
            begin = time.perf_counter()
            session.save()
            row["copied after"] = time.perf_counter() - begin
            row["step after"] = step()
            session.checkpoints.finish()
            row["written after"] = time.perf_counter() - begin
            begin = time.perf_counter()
            session.save()
            session.checkpoints.finish()
            row["written at once"] = time.perf_counter() - begin
            rows.append(row)
        newest = max((folder / "cost" / "checkpoints").iterdir())
        size = sum(file.stat().st_size for file in newest.iterdir())
        medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        if processes.is_first:
            (folder / "cost.json").write_text(json.dumps({**medians, "MB": size / 1e6}))


def main() -> None:
    """Run, print, and write the rows if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--cost-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cost_of is not None:
        measure_cost(args.cost_of)
        return
    with tempfile.TemporaryDirectory() as name:
        runs = Runs(Path(name), args.steps, args.every)
        rows = {"kills": kills(runs), "layouts": layouts(runs), "cost": [cost(runs.folder)]}
    for title, found in rows.items():
        print(title)
        for row in found:
            print(
                "  "
                + ", ".join(
                    f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
                )
            )
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
