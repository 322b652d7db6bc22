"""Keep what random ops make, for steps that a CUDA graph captures."""

from dataclasses import replace

from recollect.profile.graph import UnitGraph


def keeping_draws(graph: UnitGraph) -> UnitGraph:
    """Return the graph with the results of random ops kept, and whatever is later written over them."""
    kept = {value for op in graph.ops if op.state_bytes for value in op.outputs}
    for op in graph.ops:
        if op.mutates and op.inputs[0] in kept:
            kept.update(op.outputs)
    values = (replace(value, must_keep=True) if index in kept else value for index, value in enumerate(graph.values))
    return replace(graph, values=tuple(values))
