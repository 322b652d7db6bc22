"""Write the split of a pipeline's layers as Megatron's flags."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

__all__ = ["split_flags"]


def split_flags(sizes: Sequence[int], num_ranks: int, *, num_predicted: int = 0) -> str:
    """Return the flags with which Megatron puts as many layers on each stage; stage s is on rank s mod `num_ranks`.

    Args:
        sizes: layers of each stage, in order.
        num_ranks: of the pipeline.
        num_predicted: layers of multi-token prediction, on the last stage.

    Example:
        >>> split_flags([19, 20, 20, 21], 4)
        '--decoder-first-pipeline-num-layers 19 --decoder-last-pipeline-num-layers 21'
        >>> split_flags([4, 3, 2, 3], 2)
        "--pipeline-model-parallel-layout 'Et*4|t*3|t*2|t*3L'"
    """
    if len(set(sizes)) == 1:
        each = f"--num-layers-per-virtual-pipeline-stage {sizes[0]}"
        return each if len(sizes) > num_ranks else "no flags: as many layers in each stage"
    if len(sizes) == num_ranks and len(set(sizes[1:-1])) <= 1:
        ends = {"first": sizes[0], "last": sizes[-1]}
        between = sizes[1] if num_ranks > 2 else None
        return " ".join(f"--decoder-{end}-pipeline-num-layers {size}" for end, size in ends.items() if size != between)
    stages = [_written(size) for size in sizes]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * num_predicted + "L"
    # Stages that are alike in a row are written once; the first and the last are like no other.
    runs = [(text, len(list(run))) for text, run in groupby(stages[:-1])]
    before = "".join(f"{text}|" if count == 1 else f"({text}|)*{count}" for text, count in runs)
    return f"--pipeline-model-parallel-layout '{before}{stages[-1]}'"


def _written(size: int) -> str:
    return "t" if size == 1 else f"t*{size}"
