"""Write a plan, or a pipeline's plans, as the nearest Megatron settings: in a pipeline the same for all stages."""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations

from recollect.errors import BudgetTooSmallError, ConfigError, ConfigWarning, NotYetError
from recollect.integrations.megatron.compile import compiled_plan
from recollect.integrations.megatron.module_values import LayerOps, modules_in
from recollect.integrations.megatron.rules import RecomputeConfig
from recollect.integrations.megatron.settings import MODULES, TrainingSetting
from recollect.integrations.nearest import Nearest, nearest
from recollect.pipelines.pipeline import Pipeline, PipelinePlan, RecordedPieces
from recollect.pipelines.rank import StageParts
from recollect.pipelines.schedule import INPUT
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.value_names import collective_kind
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.decisions import decide
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.predicted import predicted_plan


def nearest_settings(profile: Profile, plan: Plan, setting: TrainingSetting | None = None) -> Nearest[RecomputeConfig]:
    """Return the fastest of Megatron's settings that fit the budget of a plan, and their loss against it.

    All of them are tried: no recompute, full recompute by both methods with every number of layers, and every set of the
    modules that the model has. Peak and time assume that recollect carries them out, minus the gathers that Megatron
    overlaps with products. Megatron itself runs a recomputed region again as a whole, so it needs at least as much.

    The plan was made from this profile; `setting` has the other facts that Megatron's rules consider, see `megatron_plan`.

    Raises:
        PlanError: the plan has no predicted peak.
        BudgetTooSmallError: none of Megatron's settings fits.

    Complexity: for each setting, that is twice the number of layers and 2 to the number of modules, a sum over the layers.

    Example:
        >>> import torch, recollect
        >>> from recollect.lab.models.architectures import llama_config
        >>> from recollect.lab.models.gpt import GPTModel
        >>> model = GPTModel(llama_config(num_layers=4, hidden_size=32, num_attention_heads=2, vocab_size=64))
        >>> tokens = torch.randint(0, 64, (4, 64))
        >>> profile = recollect.record(model, {"tokens": tokens, "labels": tokens}, fake=True)
        >>> found = nearest_settings(profile, recollect.plan(profile, "90%"))
        >>> megatron_flags(found.settings)
        '--recompute-granularity selective --recompute-modules mlp'
        >>> found.lost_s > 0
        True
    """
    sums = PeakSums.of(profile)

    def priced(made: Plan) -> Plan:
        peaks = sums.peaks(decide(profile, made))
        added_s = peaks.recompute_s - hidden_s(profile, made)
        slowdown = added_s / profile.step_s if profile.step_s else 0.0
        return replace(made, predicted_peak_bytes=peaks.peak_bytes, predicted_slowdown=slowdown)

    found = nearest(profile, plan, ((config, priced(made)) for config, made in _choices(profile, setting)))
    slowdown = found.plan.predicted_slowdown
    return replace(found, plan=replace(predicted_plan(profile, found.plan), predicted_slowdown=slowdown))


def nearest_uniform_settings(
    profiles: Sequence[Profile],
    planned: PipelinePlan,
    *,
    split_profiles: Sequence[Profile] = (),
    send_s: float = 0.0,
) -> tuple[RecomputeConfig, PipelinePlan]:
    """Return the fastest of Megatron's settings with which each rank keeps the budget of some plans, and their cost.

    The profiles are those that the plans were made from, of all stages; equal ones are the same object.

    Complexity: for each setting a sum over each distinct stage; then, from the fastest setting until one fits, over each rank.
    """
    budget_bytes = planned.peak_bytes if planned.budget_bytes is None else planned.budget_bytes
    distinct = {id(profile): profile for profile in profiles}
    plans = {key: dict(_choices(profile)) for key, profile in distinct.items()}
    everywhere = [config for config in next(iter(plans.values())) if all(config in made for made in plans.values())]
    recorded = _MegatronPieces(profiles, split_profiles)
    pipeline = Pipeline(planned.schedule, recorded)

    def added_s(config: RecomputeConfig) -> float:
        found = (recorded.added_s(piece.whole, plans[id(piece.whole.profile)][config]) for piece in recorded.pieces)
        return math.fsum(map(sum, found))

    peaks: list[int] = []
    for config in sorted(everywhere, key=added_s):
        chosen = [plans[id(profile)][config] for profile in profiles]
        peaks_bytes = pipeline.peaks_bytes(chosen)
        if max(peaks_bytes) <= budget_bytes:
            return config, pipeline.predicted(chosen, peaks_bytes, send_s=send_s)
        peaks.append(max(peaks_bytes))
    raise BudgetTooSmallError(
        budget_bytes=budget_bytes,
        least_peak_bytes=min(peaks),
        unit="the fullest rank",
        advice=("That is the leanest of Megatron's settings, the same for all stages.",),
    )


class _MegatronPieces(RecordedPieces):
    def added_s(self, parts: StageParts, plan: Plan) -> tuple[float, float]:
        first_s, second_s = super().added_s(parts, plan)
        # In halves of backward, no product for an input's gradient is beside the gather.
        return first_s, second_s if parts.parts[INPUT] else second_s - hidden_s(parts.profile, plan)


def hidden_s(profile: Profile, plan: Plan) -> float:
    """Return the seconds of gathers, under one of Megatron's plans, that Megatron overlaps with backward's products.

    It begins to gather the input of a weight's gradient before the product for the gradient of the input, which takes as long
    as the one in forward. Where the latter runs again, it waits for its input in Megatron, too.
    """
    of_graphs = [[*_gathers(graph)] for graph in profile.graphs]
    found = []
    for call in profile.calls:
        actions = plan.units[call.path].actions if call.path in plan.units else {}
        for time_s, gathered, read in of_graphs[call.graph]:
            if actions.get(gathered) == Action.RECOMPUTE and all(actions.get(n) == Action.KEEP for n in read):
                found.append(call.num_runs * time_s)
    # Rounded like the seconds of all ops that run again, to which it is never more.
    return math.fsum(found)


def _gathers(graph: UnitGraph) -> Iterator[tuple[float, str, list[str]]]:
    """Yield each gather's seconds (at most those of its reader), its name, and the names of the reader's results."""
    layer = LayerOps(graph)
    for number, op in enumerate(graph.ops):
        if not collective_kind(op.name) or layer.gathered.isdisjoint(op.outputs):
            continue
        made, readers = set(op.outputs), []
        for later in graph.ops[number + 1 :]:
            if made.isdisjoint(later.inputs):
                continue
            if layer.gathered.issuperset(later.outputs):
                made.update(later.outputs)
            else:
                readers.append(later)
        if not any(graph.values[value].saved for value in made):
            continue  # Backward does not ask for it.
        names = [graph.values[value].name for reader in readers for value in reader.outputs]
        yield min(op.time_s, sum(reader.time_s for reader in readers)), graph.values[op.outputs[0]].name, names


def megatron_flags(config: RecomputeConfig) -> str:
    """Return settings as flags of Megatron's command line; empty for no recompute.

    Example:
        >>> megatron_flags(RecomputeConfig(recompute_granularity="selective", recompute_modules=["mlp"]))
        '--recompute-granularity selective --recompute-modules mlp'
    """
    words = []
    for name, value in config.changed().items():
        words.append(f"--{name.replace('_', '-')}")
        words += map(str, value) if isinstance(value, tuple) else [str(value)]
    return " ".join(words)


def bridge_lines(config: RecomputeConfig) -> str:
    """Return settings as lines of a recipe of Megatron-Bridge; they say no recompute, too.

    Example:
        >>> print(bridge_lines(RecomputeConfig(recompute_granularity="selective", recompute_modules=["mlp"])))
        cfg.model.recompute_granularity = 'selective'
        cfg.model.recompute_modules = ['mlp']
    """
    settings = config.changed() or {"recompute_granularity": None}
    written = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    return "\n".join(f"cfg.model.{name} = {value!r}" for name, value in written.items())


def _choices(profile: Profile, setting: TrainingSetting | None = None) -> list[tuple[RecomputeConfig, Plan]]:
    """Return Megatron's settings for a recorded step, each with the plan that it means, without predictions."""
    found = []
    with warnings.catch_warnings():
        # The chosen settings are compiled again by their reader, which then warns.
        warnings.simplefilter("ignore", ConfigWarning)
        for config in _configs(profile):
            with suppress(ConfigError, NotYetError):
                found.append((config, compiled_plan(profile, config, setting)))
    return found


def _configs(profile: Profile) -> Iterator[RecomputeConfig]:
    yield RecomputeConfig()
    layers = {call.path for call in profile.calls if call.repeated}
    for method in ("uniform", "block"):
        for number in range(1, len(layers) + 1):
            yield RecomputeConfig(recompute_granularity="full", recompute_method=method, recompute_num_layers=number)
    there = modules_in(profile, layers, MODULES)
    for count in range(1, len(there) + 1):
        for names in combinations(there, count):
            yield RecomputeConfig(recompute_granularity="selective", recompute_modules=names)
