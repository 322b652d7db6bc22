"""The layers of each model chunk: a pipeline stage, or a virtual one if stages are interleaved.

Megatron counts `recompute_num_layers` in each chunk, because each chunk is a separate block of layers there.
"""

from __future__ import annotations

from recollect.errors import ConfigError
from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = ["chunk_sizes", "model_chunks"]


def model_chunks(setting: TrainingSetting, num_layers: int) -> tuple[range, ...]:
    """Return the layers of each model chunk, in the order of the model.

    Args:
        setting: gives the pipeline sizes.
        num_layers: of the whole model.

    Raises:
        ConfigError: layers that cannot be divided among the stages.

    Example:
        >>> from recollect.integrations.megatron import TrainingSetting
        >>> setting = TrainingSetting(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
        >>> model_chunks(setting, 8)
        (range(0, 2), range(2, 4), range(4, 6), range(6, 8))
    """
    starts = [0]
    for size in chunk_sizes(setting, num_layers):
        starts.append(starts[-1] + size)
    return tuple(range(start, end) for start, end in zip(starts, starts[1:], strict=False))


def chunk_sizes(setting: TrainingSetting, num_layers: int) -> list[int]:
    """Return the number of layers of each model chunk: virtual stage by virtual stage, each on all ranks in turn."""
    num_stages = setting.pipeline_model_parallel_size
    num_virtual = setting.virtual_pipeline_model_parallel_size or 1
    first, last = setting.num_layers_in_first_pipeline_stage, setting.num_layers_in_last_pipeline_stage
    num_even = num_stages - (first is not None) - (last is not None)
    even_layers = num_layers - (first or 0) - (last or 0)
    per_stage, left_over = divmod(even_layers, num_even) if num_even > 0 else (0, even_layers)
    stages = [per_stage] * num_stages
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    if left_over or min(stages) < 1 or any(size % num_virtual for size in stages):
        names = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
        uneven = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        settings = {name: getattr(setting, name) for name in (*names, *uneven)}
        raise ConfigError(
            settings={"num_layers": num_layers, **{k: v for k, v in settings.items() if v is not None}},
            reason="the layers cannot be divided among the stages",
            advice="Each stage needs the same number of layers, the first and the last excepted where theirs is set, "
            "and a multiple of the virtual stages on it.",
        )
    return [size // num_virtual for _ in range(num_virtual) for size in stages]
