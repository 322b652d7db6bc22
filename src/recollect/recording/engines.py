"""Measure what the repeated units of a recorded step take on engines besides the tape, and agree on it with other processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, TypeAlias, get_args

import torch
from torch import nn

from recollect.costs.hardware import Hardware
from recollect.engine.eager_forward import expect_compiler
from recollect.errors import NotYetError, RecordError
from recollect.planning.compiled_menu import undominated
from recollect.planning.planners import Engine
from recollect.profile.events import PEEK
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.profile.variant import VariantRecord
from recollect.quantities import parse_bytes
from recollect.ranks.group import ALONE, Place, Ranks
from recollect.ranks.members import with_common_times
from recollect.recording.joints import with_joints
from recollect.recording.step_recorder import Costs
from recollect.recording.unit_runs import ModelledRuns, UnitRuns
from recollect.recording.unit_samples import UnitSample
from recollect.recording.variants import with_variants

RecordedEngine: TypeAlias = Engine
"""What a record is for: the ops of eager mode, on the tape or from traces; or besides units inside `torch.compile`."""


def check_engine(engine: str, model: nn.Module, *, split_backward: bool) -> None:
    """Check that units can be measured on an engine in a step, and let a model be compiled that is for the compiler.

    Raises:
        RecordError: the engine is no known word.
        NotYetError: they cannot.
    """
    if engine not in get_args(RecordedEngine):
        raise RecordError(f"engine: got {engine!r}, expected {', '.join(map(repr, get_args(RecordedEngine)))}")
    if engine != "compile":
        return
    if split_backward:
        raise _not_yet(
            engine, "split_backward", True, "units that find the two halves of the gradients apart", "Leave it out"
        )
    expect_compiler(model)


def with_engine(
    engine: RecordedEngine,
    profile: Profile,
    samples: Mapping[int, UnitSample],
    device: torch.device,
    *,
    hardware: Hardware | None = None,
    costs: Costs | None = None,
    ranks: Ranks = ALONE,
    place: Place = Place.START,
    compiled: Callable[[str, float], object] = lambda path, compile_s: None,
) -> Profile:
    """Return a profile with common times, whose repeated units have what an engine takes besides the tape in all processes.

    With units inside `torch.compile`, the step is that in which they run as PyTorch chooses.

    Raises:
        NotYetError: a backward of the step keeps its graph for another one, and units are to be compiled.

    Warns:
        UserWarning: units of some kind cannot be compiled, or have graph breaks.
    """
    profile = with_common_times(profile, ranks, place)
    if engine in ("auto", "graph") and samples:
        return ranks.together(lambda: with_joints(profile, samples, device, costs), place)
    if engine != "compile":
        return profile

    def measured() -> Profile:
        _check_backward(profile)
        runs = UnitRuns(device) if hardware is None else ModelledRuns(device, hardware, profile.kernels)
        return with_variants(profile, samples, runs, compiled=compiled)

    found = with_common_times(_in_all(ranks.together(measured, place), ranks, place), ranks, place)
    graphs = (replace(graph, variants=undominated(graph.variants, graph)) for graph in found.graphs)
    return _compiled_step(replace(found, graphs=tuple(graphs)))


def check_host_engine(engine: str, host_budget: int | str) -> None:
    """Check that other engines than the tape and host memory are not asked for together.

    Raises:
        NotYetError: they are.
    """
    if engine not in ("tape", "auto") and parse_bytes(host_budget):
        raise _not_yet(engine, "host_budget", host_budget, "copies to host memory", "Leave out host_budget")


def _check_backward(profile: Profile) -> None:
    """Refuse to compile units of a step whose backward runs twice over one graph."""
    if any(True for _ in profile.log.operands(PEEK)):
        needs, advice = "compiled code that runs backward twice", "Make the step's backward without retain_graph"
        raise _not_yet("compile", "retain_graph", True, needs, advice)


def _not_yet(engine: str, name: str, value: object, needs: str, advice: str) -> NotYetError:
    advice = f"{advice}; or leave the engine at 'tape', on which plans then recompute."
    return NotYetError(settings={"engine": engine, name: value}, needs=needs, advice=advice)


def _in_all(profile: Profile, ranks: Ranks, place: Place) -> Profile:
    """Return a profile whose units have only the variants that they have in all processes.

    Batches may differ, so that a unit has other graphs in other processes: its path and the names of its values count.
    """
    paths: dict[int, list[str]] = {}
    for call in profile.calls:
        paths.setdefault(call.graph, []).append(call.path)
    own = {(path, key) for index, its in paths.items() for path in its for key in _measured_of(profile.graphs[index])}
    common = own.intersection(*ranks.gather(own, place))

    def left(index: int, graph: UnitGraph) -> UnitGraph:
        keys = {key for key in _measured_of(graph) if all((path, key) in common for path in paths[index])}
        kept = [variant for variant in graph.variants if _key_of(variant, graph) in keys]
        return replace(
            graph,
            eager_s=graph.eager_s if _DEFAULT in keys else 0.0,
            variants=tuple(kept) if _DEFAULT in keys else (),
        )

    return replace(profile, graphs=tuple(left(index, graph) for index, graph in enumerate(profile.graphs)))


# Variants go by the names of the values that they keep, but for this one.
_DEFAULT: Final = "PyTorch's choice"


def _measured_of(graph: UnitGraph) -> set[str | frozenset[str]]:
    return {_key_of(variant, graph) for variant in graph.variants}


def _key_of(variant: VariantRecord, graph: UnitGraph) -> str | frozenset[str]:
    return _DEFAULT if variant.is_default else frozenset(graph.values[index].name for index in variant.kept)


def _compiled_step(profile: Profile) -> Profile:
    """Return the profile of the step in which all units with variants run compiled, as PyTorch chooses."""
    graphs = profile.graphs
    compiled = [(call.num_runs, graphs[call.graph]) for call in profile.calls if graphs[call.graph].variants]
    saved_s = math.fsum(number * graph.beyond_default_s(graph.eager_s) for number, graph in compiled)
    units_s = math.fsum(number * graph.variants[0].step_s for number, graph in compiled)
    return replace(profile, step_s=max(units_s, profile.step_s - saved_s))
