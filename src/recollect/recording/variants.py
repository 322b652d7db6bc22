"""Measure time and memory of repeated units inside `torch.compile`, for each set of values that they may keep.

A copy of each kind of unit is compiled for PyTorch's own choice and for each entry of `compiled_menu`. Its memory is traced in
one run alone (`unit_runs.py`), which is exact, since identical layers run identical code; then all are timed in turn.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recollect.engine.compiled.compiled_engine import compile_forward, named_as_inside
from recollect.planning.compiled_menu import Keeps, compiled_menu
from recollect.plans.paths import unit_words
from recollect.plans.value_names import module_of, result_names, value_stem
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.profile.variant import VariantRecord
from recollect.progress import stage
from recollect.recording.unit_runs import UnitRuns
from recollect.recording.unit_samples import FailedKinds, UnitSample
from recollect.warning import warn_user

if TYPE_CHECKING:
    from recollect.engine.compiled.partitioner import Partition


def with_variants(
    profile: Profile,
    samples: Mapping[int, UnitSample],
    runs: UnitRuns,
    *,
    menu: Callable[[UnitGraph], Sequence[Keeps]] = compiled_menu,
    compiled: Callable[[str, float], object] = lambda path, compile_s: None,
) -> Profile:
    """Return a profile whose repeated units have a variant for each entry of a menu, as measured or modelled in this process.

    `samples`: for each graph, a call of a unit that has it, or has the same ops on as many bytes. PyTorch's own choice is
    compiled besides the menu. `compiled` is told a unit's path and the seconds that compiling it once took, for each variant.
    """
    paths = {call.graph: call.path for call in reversed(profile.calls) if call.repeated}
    of_kind: dict[int, list[int]] = {}
    for index in sorted(paths):
        of_kind.setdefault(id(samples[index]) if index in samples else -1, []).append(index)
    if missing := of_kind.pop(-1, ()):
        _warn(profile, missing, "a copy of it cannot run by itself")
    graphs = list(profile.graphs)
    menus = {kind: menu(graphs[indices[0]]) for kind, indices in of_kind.items()}
    failed = FailedKinds()
    left_out: dict[str, list[int]] = {}
    with stage("compiling units", total=sum(1 + len(entries) for entries in menus.values())) as done:
        for kind, indices in of_kind.items():

            def note(compile_s: float, path: str = paths[indices[0]]) -> None:
                compiled(path, compile_s)
                done()

            sample = samples[indices[0]]
            if not (reason := failed.reason(sample)):
                try:
                    variants, eager_s = _measured(sample, graphs[indices[0]], menus[kind], runs, note)
                except _CannotCompileError as error:
                    reason = failed.note(sample, str(error))
            if reason:
                left_out.setdefault(reason, []).extend(indices)
                continue
            for index in indices:
                graphs[index] = replace(graphs[index], variants=variants, eager_s=eager_s)
    for reason, indices in left_out.items():
        _warn(profile, indices, reason)
    return replace(profile, graphs=tuple(graphs))


def _warn(profile: Profile, graphs: Sequence[int], reason: str) -> None:
    paths = list(dict.fromkeys(call.path for call in profile.calls if call.graph in graphs and call.repeated))
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    warn_user(
        f"{unit_words(paths[0])}{more} cannot run inside torch.compile: {reason}. Plans will leave "
        f"{'them' if more else 'it'} outside the compiler."
    )


class _CannotCompileError(Exception):
    """A unit cannot be compiled; the text says why."""


@dataclass(frozen=True)
class _Compiled:
    forward: Callable[..., Any]
    record: VariantRecord
    compile_s: float


def _measured(
    sample: UnitSample, graph: UnitGraph, menu: Sequence[Keeps], runs: UnitRuns, note: Callable[[float], None]
) -> tuple[tuple[VariantRecord, ...], float]:
    """Compile a unit in each way, trace each, and time all; return these variants, and the seconds outside the compiler."""
    # Here: it imports the compiler.
    from recollect._torch_compile import quiet_cache

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(quiet_cache())
        # Warnings of the compiler, and of values in the menu that the unit does not compute there.
        warnings.simplefilter("ignore")
        try:
            sample, module = stack.enter_context(runs.copied(sample))
        except Exception as error:  # the user's attributes may raise anything
            raise _CannotCompileError(f"a copy of it cannot be made ({type(error).__name__}: {error})") from error
        found: list[_Compiled] = []
        saved = set[Any]()
        for keeps in (None, *menu):
            one = _compiled(sample, module, graph, keeps, runs, saved)
            note(one.compile_s if one is not None else 0.0)
            if one is not None:
                found.append(one)
        return _timed(sample, module, found, runs)


def _compiled(
    sample: UnitSample,
    module: nn.Module,
    graph: UnitGraph,
    keeps: Keeps | None,
    runs: UnitRuns,
    saved: set[Any],
) -> _Compiled | None:
    """Compile a unit that keeps certain values, and trace it; None if its saved values are in `saved`, to which this adds them.

    Backward may not need every value that an entry names, so several entries may come to the same.
    """
    cuts: list[Partition] = []

    def note_cut(cut: Partition) -> None:
        cuts.append(cut)
        if _saved_by(cut) in saved:
            raise _KnownError  # before code is generated, which takes nearly all the time

    inside = None if keeps is None else named_as_inside(keeps)
    forward = compile_forward(module.forward, inside, on_partition=note_cut)
    try:
        begin = time.perf_counter()
        if runs.time(sample, module, forward) is None:
            raise _CannotCompileError("there is nothing to differentiate in it")
        compile_s = time.perf_counter() - begin
        runs.time(sample, module, forward)  # It makes whatever is made once.
        trace = runs.trace(sample, forward)
    except (torch.OutOfMemoryError, _CannotCompileError):
        raise
    except Exception as error:  # the compiler, and the user's module in it, may raise anything
        if cuts and _saved_by(cuts[0]) in saved:
            return None
        line = next(iter(str(error).splitlines()), "")
        raise _CannotCompileError(f"{type(error).__name__}: {line}") from error
    module.zero_grad(set_to_none=True)
    if len(cuts) != 1:
        raise _CannotCompileError(f"it becomes {len(cuts)} graphs, expected one")
    saved.add(_saved_by(cuts[0]))
    index_of = named_as_inside(_names_of(graph))
    kept = {index_of[name] for name in cuts[0].kept if name in index_of}
    record = replace(
        trace,
        kept=tuple(sorted(index for index in kept if not graph.values[index].is_output)),
        is_default=keeps is None,
        is_estimated=runs.is_modelled,
    )
    return _Compiled(forward, record, compile_s)


class _KnownError(Exception):
    """A cut is the same as an earlier one."""


def _saved_by(cut: Partition) -> tuple[tuple[Any, ...], ...]:
    return cut.kept, cut.unnamed, cut.inputs


def _names_of(graph: UnitGraph) -> dict[str, int]:
    """Return the values by name, including the names of ops that write in place, but not in compiled code."""
    found: dict[str, int] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for op in graph.ops:
        module = module_of(op.name)
        key = module, op.name.removeprefix(f"{module}.").partition("#")[0].rstrip("_")
        stem = value_stem(*key, counts[key])
        counts[key] += 1
        found |= dict(zip(result_names(stem, len(op.outputs)), op.outputs, strict=True))
    return found | {value.name: index for index, value in graph.made}


def _timed(
    sample: UnitSample, module: nn.Module, found: Sequence[_Compiled], runs: UnitRuns
) -> tuple[tuple[VariantRecord, ...], float]:
    """Time a unit outside the compiler and inside it in each way, in turn."""
    forwards = [None, *(one.forward for one in found)]

    def one_round() -> Iterator[float]:
        for forward in forwards:
            yield math.fsum(runs.time(sample, module, forward) or ())

    rounds = [list(one_round())]  # A warm-up.
    rounds = [list(one_round()) for _ in range(runs.rounds(math.fsum(rounds[0])))]
    eager_s, *compiled_s = (statistics.median(times) for times in zip(*rounds, strict=True))
    variants = (replace(one.record, step_s=step_s) for one, step_s in zip(found, compiled_s, strict=True))
    return tuple(variants), eager_s
