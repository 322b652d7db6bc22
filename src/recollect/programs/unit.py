"""Cuts and plays the traced units of a profile, each in each way once."""

import math
from functools import cache, partial

from recollect.profile.graph import OpRecord, UnitGraph
from recollect.profile.profile import block_bytes
from recollect.profile.variant import VariantRecord
from recollect.programs.cut import Cut, UntraceableError, cut
from recollect.programs.play import made_values, play, values_by_memory


@cache
def cut_unit(graph: UnitGraph, recomputed: frozenset[int]) -> Cut | None:
    """Cut a unit by the values that a plan recomputes; None if it stays on the tape.

    That is if it was not traced, or something would have to run again that cannot.
    """
    joint = graph.joint
    if joint is None:
        return None
    values = made_values(graph, joint)
    outputs = {op.name: op.outputs for op in graph.ops if op.mutates}

    def is_kept(number: int, index: int) -> bool:
        op = joint.ops[number]
        made = [value for result in op.results[index : index + 1] if (value := values.get(result)) is not None]
        return op.keeps or recomputed.isdisjoint(made or outputs.get(op.name, ())[:1])

    try:
        return cut(joint, is_kept)
    except UntraceableError:
        return None


@cache
def ops_again(graph: UnitGraph, recomputed: frozenset[int]) -> tuple[OpRecord, ...]:
    """Return the ops that a traced unit runs again, in order."""
    joint, made = graph.joint, cut_unit(graph, recomputed)
    if joint is None or made is None:
        return ()
    ops = {op.name: op for op in graph.ops}
    names = (joint.ops[number].name for number in made.backward if number < joint.num_forward)
    return tuple(ops[name] for name in names if name in ops)


@cache
def again_s(graph: UnitGraph, recomputed: frozenset[int]) -> float:
    return math.fsum(op.time_s for op in ops_again(graph, recomputed))


@cache
def returned_values(graph: UnitGraph) -> frozenset[int]:
    """Return the values that a traced unit makes and hands out: its outputs, and values that it leaves elsewhere."""
    joint = graph.joint
    if joint is None:
        return frozenset()
    values = values_by_memory(graph, joint)
    return frozenset(values[joint.tensors[one]] for one in joint.outputs if joint.tensors[one] in values)


@cache
def played_unit(
    graph: UnitGraph, recomputed: frozenset[int], device: str, *, is_chained: bool, is_retained: bool = False
) -> VariantRecord:
    """Return the memory use of a unit that runs from its trace on a type of device; see `play`."""
    made = cut_unit(graph, recomputed)
    if made is None:
        raise ValueError("the unit has no trace that can be cut so, expected one")
    step_s = 3 * graph.forward_s + again_s(graph, recomputed)
    blocks = partial(block_bytes, device=device)
    return play(graph, made, blocks, step_s, is_chained=is_chained, is_retained=is_retained)
