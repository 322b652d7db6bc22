"""Measure what each process of a run holds at most while it builds its part of the model, and how long that takes.

    torchrun --nproc-per-node 4 benchmarks/building.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    python benchmarks/building.py --num-layers 2

Prints a line for each process: its weights, by how much the most memory that it ever held (`ru_maxrss`) grew, and seconds.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
import tyro

from recollect.lab.parallel.flags import ParallelFlags
from recollect.lab.train.config import DataFlags, ModelFlags, OptimFlags, ProcessFlags, RunFlags, StepFlags, TrainConfig
from recollect.lab.train.exchange import local_part
from recollect.lab.train.processes import joined_processes
from recollect.lab.train.trained import build_trained


@dataclass(frozen=True, kw_only=True)
class Flags(ParallelFlags):
    """What to build, and how to spread it; weights are fp32."""

    num_layers: int = 6
    """Layers, as wide as those of a model of a billion parameters."""
    hidden_size: int = 2048
    """Width of the residual stream."""
    vocab_size: int = 32_000
    """Rows of the embedding and of the LM head."""


def main(flags: Flags) -> None:
    """Build, and print what it took."""
    own = {name: getattr(flags, name) for name in ParallelFlags.__dataclass_fields__}
    model = ModelFlags(size="llama-tiny", num_attention_heads=16, num_query_groups=16, ffn_hidden_size=4 * flags.hidden_size, **{n: getattr(flags, n) for n in ("num_layers", "hidden_size", "vocab_size")})
    config = TrainConfig(
        model=model,
        data=DataFlags(data=(Path(__file__),), seq_length=64),
        optim=OptimFlags(batch_size=1, accumulation=8),
        step=StepFlags(device="cpu"),
        run=RunFlags(),
        parallel=ProcessFlags(**own),
    )
    with joined_processes(config) as processes:
        before, begin = _most_bytes(), time.perf_counter()
        trained = build_trained(model.dimensions(flags.vocab_size), config, processes)
        took_s, grown = time.perf_counter() - begin, _most_bytes() - before
        weights = sum(local_part(p).nbytes for p in trained.model.parameters())
        rank = dist.get_rank() if dist.is_initialized() else 0
        print(f"rank {rank}: weights {weights / 1e6:.0f} MB, growth {grown / 1e6:.0f} MB, {took_s:.1f} s", flush=True)
    # A process group's threads may hang at the end.
    os._exit(0)


def _most_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
