"""The layers of each model chunk (a pipeline stage, or a virtual one if stages are interleaved), and their split as flags.

Megatron counts `recompute_num_layers` in each chunk, because each chunk is a separate block of layers there.
"""

import re
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import Final

from recollect.errors import ConfigError
from recollect.integrations.megatron.settings import TrainingSetting

_LETTERS: Final = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_REPEATED: Final = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")


def model_chunks(setting: TrainingSetting, num_layers: int) -> tuple[range, ...]:
    """Return the layers of each model chunk, in the order of the model; raise if they cannot be divided among the stages.

    Example:
        >>> setting = TrainingSetting(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
        >>> model_chunks(setting, 8)
        (range(0, 2), range(2, 4), range(4, 6), range(6, 8))
    """
    edges = accumulate(chunk_sizes(setting, num_layers), initial=0)
    return tuple(range(start, end) for start, end in pairwise(edges))


def num_virtual_stages(num_layers: int, num_stages: int, layers_each: int) -> int:
    """Return how many virtual stages of a size each stage has; rounded up, since a remainder then does not divide.

    `num_layers`: with embedding and loss, where they count.
    """
    return -(-num_layers // (num_stages * layers_each))


def chunk_sizes(setting: TrainingSetting, num_layers: int) -> list[int]:
    """Return the number of layers of each model chunk: virtual stage by virtual stage, each on all ranks in turn."""
    if setting.pipeline_model_parallel_layout is not None:
        return _sizes_of_layout(setting, setting.pipeline_model_parallel_layout, num_layers)
    num_stages = setting.pipeline_model_parallel_size
    num_virtual = setting.virtual_pipeline_model_parallel_size or 1
    ends = setting.account_for_embedding_in_pipeline_split, setting.account_for_loss_in_pipeline_split
    first, last = setting.num_layers_in_first_pipeline_stage, setting.num_layers_in_last_pipeline_stage
    num_even = num_stages - (first is not None) - (last is not None)
    even_layers = num_layers - (first or 0) - (last or 0) + sum(ends)
    per_stage, left_over = divmod(even_layers, num_even) if num_even > 0 else (0, even_layers)
    stages = [per_stage] * num_stages
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    has_two = any(ends) and (first is not None or last is not None)
    if left_over or min(stages) < 1 or any(size % num_virtual for size in stages) or has_two:
        names = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
        uneven = (
            *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
            *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        )
        settings = {name: getattr(setting, name) for name in (*names, *uneven)}
        raise ConfigError(
            settings={"num_layers": num_layers, **{k: v for k, v in settings.items() if v not in (None, False)}},
            reason="the layers cannot be divided among the stages",
            advice="Each stage needs the same number of layers, the first and the last excepted where theirs is set, "
            "and a multiple of the virtual stages on it. Embedding and loss may count as a layer each instead.",
        )
    sizes = [size // num_virtual for _ in range(num_virtual) for size in stages]
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    return sizes


def layout_stages(layout: str | Sequence[Sequence[str]]) -> list[str]:
    """Return what is on each stage of a `pipeline_model_parallel_layout`, as its letters.

    Example:
        >>> layout_stages("Et*2|(tt|)*2m|L"), layout_stages([["embedding", "decoder"], ["decoder", "loss"]])
        (['Ett', 'tt', 'tt', 'm', 'L'], ['Et', 'tL'])
    """
    layout = getattr(layout, "input_data", layout)  # of Megatron's own PipelineParallelLayerLayout
    if not isinstance(layout, str):
        return ["".join(_LETTERS.get(part.strip().lower(), part) for part in stage) for stage in layout]
    text = layout.replace(",", "")
    for pattern in _REPEATED:
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return text.split("|")


def _sizes_of_layout(setting: TrainingSetting, layout: str | Sequence[Sequence[str]], num_layers: int) -> list[int]:
    stages, ranks = layout_stages(layout), setting.pipeline_model_parallel_size
    letters = "E" + "t" * num_layers + "m" * (setting.mtp_num_layers or 0) + "L"
    is_whole = "".join(stages) == letters and stages[0][:1] == "E" and stages[-1][-1:] == "L"
    if not is_whole or len(stages) % ranks:
        found = ", ".join(f"{len(list(run))} {letter}" for letter, run in groupby("".join(stages)))
        raise ConfigError(
            settings={
                "pipeline_model_parallel_layout": layout,
                "num_layers": num_layers,
                "mtp_num_layers": setting.mtp_num_layers,
                "pipeline_model_parallel_size": ranks,
            },
            reason=f"it has {found} on {len(stages)} stages",
            advice="Write E on the first stage, a t for each layer, an m for each depth of multi-token prediction and L on the "
            "last stage, in this order, and as many stages for each rank.",
        )
    return [stage.count("t") for stage in stages]


def split_flags(sizes: Sequence[int], num_ranks: int, *, num_predicted: int = 0) -> str:
    """Return the flags that make Megatron put this many layers on each stage; stage s is on rank s mod `num_ranks`.

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
    stages = ["t" * size if size < 2 else f"t*{size}" for size in sizes]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * num_predicted + "L"
    # Stages that are alike in a row are written once; the first and the last are like no other.
    runs = [(text, len(list(run))) for text, run in groupby(stages[:-1])]
    before = "".join(f"{text}|" if count == 1 else f"({text}|)*{count}" for text, count in runs)
    return f"--pipeline-model-parallel-layout '{before}{stages[-1]}'"
