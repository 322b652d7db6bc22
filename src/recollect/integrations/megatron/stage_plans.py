"""What Megatron's settings mean on a pipeline: plans for each of its stages, and for each micro-batch where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from recollect.arguments import check_kind
from recollect.errors import ScheduleError
from recollect.integrations.megatron.choice import BlockFull
from recollect.integrations.megatron.compile import megatron_plan
from recollect.integrations.megatron.config import RecomputeConfig
from recollect.integrations.megatron.rules import refuse_not_yet
from recollect.integrations.megatron.training_setting import TrainingSetting
from recollect.pipelines.schedule import FORWARD, PipelineAction, schedule_of
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile

__all__ = ["megatron_stage_plans"]


def megatron_stage_plans(
    profiles: Sequence[Profile], schedule: Any, config: RecomputeConfig
) -> tuple[Plan | tuple[Plan, ...], ...]:
    """Return the plans that a Megatron configuration means for the stages of a pipeline, for `predict_pipeline` and `apply`.

    `recompute_num_layers` counts in each stage, virtual ones too, as each is a block of layers of its own there.

    With `num_microbatches_with_partial_activation_checkpoints` = N, a rank takes its forwards in windows of as many as it runs
    before its first backward. The first N of a window recompute what the other settings say; the rest recompute all layers of
    their stage. With `uniform` that is the same, and with `selective` every layer recomputes its modules either way.

    Args:
        profiles: one for each stage, see `recollect.plan_pipeline`.
        schedule: see `recollect.plan_pipeline`.
        config: Megatron's settings.

    Returns:
        For each stage a plan, or a plan for each micro-batch.

    Raises:
        ScheduleError: not one profile for each stage, or a schedule that cannot run.
        ArgumentError, ConfigError, NotYetError: as `megatron_plan`.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> stage = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> profile = recollect.record(
        ...     stage,
        ...     torch.randn(16, 32, requires_grad=True),
        ...     loss_fn=torch.sum,
        ...     gradients="accumulated",
        ...     holds_output=False,
        ...     fake=True,
        ... )
        >>> schedule = recollect.PipelineSchedule.one_f_one_b(num_stages=2, num_micro_batches=4)
        >>> config = RecomputeConfig(
        ...     recompute_granularity="full",
        ...     recompute_method="block",
        ...     recompute_num_layers=1,
        ...     num_microbatches_with_partial_activation_checkpoints=1,
        ... )
        >>> plans = megatron_stage_plans([profile] * 2, schedule, config)
        >>> [plan.note for plan in plans[0]]
        ['Megatron: full, block, 1', 'Megatron: full, block, 4', 'Megatron: full, block, 1', 'Megatron: full, block, 4']
        >>> recollect.predict_pipeline([profile] * 2, schedule, plans).slowdown > 0
        True
    """
    check_kind(
        "megatron_stage_plans(profiles, schedule, config)",
        "config",
        config,
        RecomputeConfig,
        "recollect.RecomputeConfig",
    )
    found = schedule_of(schedule)
    if len(profiles) != found.num_stages:
        raise ScheduleError(
            f"got {len(profiles)} profiles for a schedule of {found.num_stages} stages, expected one for each"
        )
    alike = replace(config, num_microbatches_with_partial_activation_checkpoints=None)
    refuse_not_yet(alike, TrainingSetting(pipeline_model_parallel_size=found.num_stages))
    num_partial = config.num_microbatches_with_partial_activation_checkpoints
    distinct = {id(profile): profile for profile in profiles}
    partial = {key: megatron_plan(profile, alike) for key, profile in distinct.items()}
    if num_partial is None or not isinstance(config.choice, BlockFull):
        return tuple(partial[id(profile)] for profile in profiles)
    rest = {key: _of_all_layers(profile, alike) for key, profile in distinct.items()}
    made: dict[int, dict[int, Plan]] = {stage: {} for stage in range(found.num_stages)}
    for actions in found.ranks:
        window = sum(1 for _ in takewhile(_is_forward, actions))
        for number, action in enumerate(filter(_is_forward, actions)):
            plans = partial if number % window < num_partial else rest
            made[action.stage][action.micro_batch] = plans[id(profiles[action.stage])]
    return tuple(tuple(own[batch] for batch in sorted(own)) for own in made.values())


def _is_forward(action: PipelineAction) -> bool:
    return action.kind == FORWARD


def _of_all_layers(profile: Profile, config: RecomputeConfig) -> Plan:
    layers = {call.path for call in profile.calls if call.repeated}
    return megatron_plan(profile, replace(config, recompute_num_layers=max(1, len(layers))))
