"""Choose which layers go to which stage of a pipeline on a cluster, together with the plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from recollect.errors import ConfigError
from recollect.lab.parallel.cluster_schedule import schedule_of_step, send_s
from recollect.lab.parallel.cluster_step import ClusterStep, record_stages
from recollect.pipelines.split_pipeline import PipelineSplit, split_pipeline

__all__ = ["choose_split", "with_split"]


def choose_split(step: ClusterStep, budget: int | str) -> PipelineSplit:
    """Return the layers of each stage with which a step within the budget is the shortest that was found.

    Single layers are recorded, the first with the embedding and the last with norm, LM head and loss.

    Args:
        step: its layout says how many stages there are.
        budget: of each device; a percentage is of what the fullest rank needs without recompute, with as many layers in
            each stage.

    Raises:
        BudgetTooSmallError: no split that was tried fits.
        ConfigError: a layout that says which layers go where, or has more stages than there are layers; or as `record_stages`.

    Complexity: see `split_pipeline`.
    """
    layout, num_layers = step.layout, step.config.num_layers
    names = ("pipeline_split", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    if given := {name: getattr(layout, name) for name in names if getattr(layout, name) is not None}:
        raise ConfigError(
            settings={"pipeline_split": "auto", **given},
            reason="both say how many layers stages have",
            advice="Leave one of them out.",
        )
    num_stages = layout.num_stages(num_layers)
    if layout.pipeline_model_parallel_size == 1 or num_layers < num_stages:
        raise ConfigError(
            settings={
                "pipeline_split": "auto",
                "num_layers": num_layers,
                "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
            },
            reason=f"there are {num_stages} stages to divide the layers among",
            advice="Use two ranks of the pipeline or more, and as many layers as stages at least.",
        )
    each, rest = divmod(num_layers, num_stages)
    even = with_split(step, [each + (stage < rest) for stage in range(num_stages)])
    layers = record_stages(even, [range(layer, layer + 1) for layer in range(num_layers)])
    return split_pipeline(
        layers.profiles,
        schedule_of_step(even),
        budget,
        split_layers=layers.split_profiles,
        send_s=send_s(even),
    )


def with_split(step: ClusterStep, sizes: Sequence[int]) -> ClusterStep:
    """Return the step with some layers in each stage."""
    layout = replace(step.layout, num_layers_per_virtual_pipeline_stage=None, pipeline_split=tuple(sizes))
    return replace(step, layout=layout)
