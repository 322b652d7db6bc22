"""Compare what compiled layers take, as estimated on fake tensors and as measured, for each set of values in both.

    recollect calibrate --out hardware.json
    OMP_NUM_THREADS=1 python benchmarks/estimated.py --hardware hardware.json --models reference dense --bf16

Each line has a set of values: bytes as measured, and by how much the estimate is above them; the time, and the estimated one as
a multiple of it.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import get_args

import torch
import tyro

import recollect
from models import ModelName, build, model_inputs
from recollect.profile.graph import UnitGraph
from recollect.profile.variant import VariantRecord


@dataclass
class Comparison:
    """What to compare."""

    hardware: str
    """File that `recollect calibrate` wrote on this machine."""
    models: tuple[ModelName, ...] = get_args(ModelName)
    bf16: bool = False


def main(asked: Comparison) -> None:
    torch.set_num_threads(1)
    for name in asked.models:
        torch.manual_seed(0)
        model = build(name, hidden_size=256, num_layers=2, num_heads=4, vocab_size=512)
        model = model.to(torch.bfloat16 if asked.bf16 else torch.float32)
        batch = model_inputs(name, torch.randint(0, 512, (4, 128)))
        begin = time.perf_counter()
        estimated = recollect.record(model, batch, fake=True, hardware=asked.hardware, engine="compile")
        middle = time.perf_counter()
        measured = recollect.record(model, batch, engine="compile")
        print(
            f"{name}: estimated in {middle - begin:.0f} s, measured in {time.perf_counter() - middle:.0f} s", flush=True
        )
        for one, other in zip(estimated.graphs, measured.graphs, strict=True):
            _compare(one, other)


def _compare(estimated: UnitGraph, measured: UnitGraph) -> None:
    found = {_kept(variant, estimated): variant for variant in estimated.variants}
    for variant in measured.variants:
        kept = _kept(variant, measured)
        if (guess := found.get(kept)) is not None:
            print(
                f"  {'default' if kept is True else len(variant.kept):>7} own {variant.own_bytes:>9,} "
                f"{guess.own_bytes - variant.own_bytes:+,}, forward {variant.forward_bytes:>9,} "
                f"{guess.forward_bytes - variant.forward_bytes:+,}, backward {_most(variant):>9,} "
                f"{_most(guess) - _most(variant):+,}, {1e3 * variant.step_s:.1f} ms x {guess.step_s / variant.step_s:.2f}"
            )


def _kept(variant: VariantRecord, graph: UnitGraph) -> bool | frozenset[str]:
    return variant.is_default or frozenset(graph.values[value].name for value in variant.kept)


def _most(variant: VariantRecord) -> int:
    """Return the most bytes of backward above those at its begin, where others hold what the unit holds, too."""
    most_bytes = now_bytes = 0
    for stretch_bytes, change_bytes, _ in variant.backward:
        most_bytes = max(most_bytes, now_bytes + stretch_bytes)
        now_bytes += change_bytes
    return most_bytes


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(tyro.cli(Comparison))
