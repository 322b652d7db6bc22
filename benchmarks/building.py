"""Measure what each process of a run holds at most while it builds its part of the model, and how long that takes.

    torchrun --nproc-per-node 4 benchmarks/building.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    python benchmarks/building.py --num-layers 4

Prints a line for each process: its weights, by how much the most memory that it ever held (`ru_maxrss`) grew, and seconds.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass, fields
from pathlib import Path

import torch.distributed as dist

from flags import parse
from recollect._torch_dtensor import local_part
from recollect.lab.parallel.layout import ParallelFlags
from recollect.lab.train.config import DataFlags, ProcessFlags, TrainConfig
from recollect.lab.train.model_flags import ModelFlags, SizeName
from recollect.lab.train.optim_flags import OptimFlags
from recollect.lab.train.processes import joined_processes
from recollect.lab.train.trained import build_trained


@dataclass(frozen=True, kw_only=True)
class Flags(ParallelFlags):
    """What to build, in fp32, and how to spread it."""

    size: SizeName = "1b"
    """A named model."""
    num_layers: int = 8
    """Layers of it."""


def main(flags: Flags) -> None:
    """Build, and print what it took."""
    layout = {field.name: getattr(flags, field.name) for field in fields(ParallelFlags)}
    config = TrainConfig(
        model=ModelFlags(size=flags.size, num_layers=flags.num_layers),
        data=DataFlags(data=(Path(__file__),)),
        optim=OptimFlags(batch_size=1, accumulation=64),
        parallel=ProcessFlags(**layout),
    )
    with joined_processes(config) as processes:
        before_bytes, begin = _most_bytes(), time.perf_counter()
        model = build_trained(config.model.dimensions(), config, processes).model
        took_s, grown_bytes = time.perf_counter() - begin, _most_bytes() - before_bytes
        own_bytes = sum(local_part(parameter).nbytes for parameter in model.parameters())
        rank = dist.get_rank() if dist.is_initialized() else 0
        grew = f"grew by {grown_bytes / 1e6:.0f} MB in {took_s:.1f} s"
        print(f"rank {rank}: weights {own_bytes / 1e6:.0f} MB, {grew}", flush=True)
    # A process group's threads may hang at the end.
    os._exit(0)


def _most_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(parse(Flags, __doc__))
