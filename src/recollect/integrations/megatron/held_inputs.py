"""Megatron's `distribute_saved_activations`: the kept inputs of recomputed layers, of which each rank holds a part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from recollect.errors import ConfigError
from recollect.plans.action import Action
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.profile import Profile
from recollect.simulation.decisions import keep_all_unit

__all__ = ["with_inputs_as_parts"]


def with_inputs_as_parts(
    profile: Profile, units: Mapping[str, UnitPlan], layers: Collection[str]
) -> dict[str, UnitPlan]:
    """Return a plan's units with the inputs of some layers held as parts.

    Like Megatron, which distributes the first argument of a region alone: what other layers read too, such as rotary positions,
    is kept whole.

    Args:
        profile: the recorded step.
        units: the plan.
        layers: paths of those whose input is kept for a recompute.

    Raises:
        ConfigError: the profile does not know of ranks that hold parts.
    """
    if profile.shard_ranks == 1:
        raise ConfigError(
            settings={"distribute_saved_activations": True},
            reason="the step was recorded without ranks to distribute to",
            advice="Call recollect.distribute_saved_activations(model, group) before recollect.record, with the ranks of "
            "tensor parallelism; `recollect train` does.",
        )
    num_readers = Counter(
        (call, value) for other in profile.calls if other.repeated for _, call, value in set(other.origins)
    )
    found = dict(units)
    for reader in profile.calls:
        if reader.path not in layers:
            continue
        for _, origin, value in reader.origins:
            if num_readers[origin, value] > 1:
                continue
            maker = profile.calls[origin]
            graph = profile.graph_of(maker)
            unit = found.get(maker.path) or keep_all_unit(graph)
            found[maker.path] = replace(unit, actions={**unit.actions, graph.values[value].name: Action.SHARD})
    return found
