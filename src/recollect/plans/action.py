"""Defines the actions on a value between forward and backward, and the engines, which carry out plans."""

from enum import Enum


class Action(str, Enum):
    """The action for one value. A plan maps values to actions and keeps values that it does not name.

    Each action equals its word, which plans use in JSON and people may pass in its place.

    Attributes:
        KEEP: the value stays in memory for as long as something needs it.
        RECOMPUTE: the value is dropped in forward and computed again when backward asks for it.
        SHARD: each rank of a group keeps a part of the value, which is the same on all of them; it is gathered when backward
            asks for it. See `recollect.distribute_saved_activations`.
        OFFLOAD: the value is copied to host memory and leaves the device; it is copied back before backward asks for it.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    SHARD = "shard"
    OFFLOAD = "offload"

    def __str__(self) -> str:
        return self.value


OUTPUT_ACTIONS = (Action.KEEP, Action.RECOMPUTE)
"""The possible actions for a unit's output; it is kept as a part, or offloaded, if its value's own action says so."""


class EngineChoice(str, Enum):
    """Which engine carries a unit's plan out; each equals its word, as an `Action` does.

    `recollect.engine.tape_engine` has the code that carries each out, `recollect.simulation.simulate` the simulation of each.

    Attributes:
        TAPE: keep or drop value by value: dropped values are recomputed, op by op, when backward asks for them.
        GRAPH: do the same from a trace of the module: forward and backward are straight-line programs of the ops that eager
            mode would run, without the tape's work around each op. Units that cannot be traced run on the tape.
        COMPILE: run the module inside `torch.compile`, which keeps the values that the plan keeps and computes the others again
            in backward, fused with it. Gradients are those of the compiled module.
    """

    TAPE = "tape"
    GRAPH = "graph"
    COMPILE = "compile"

    def __str__(self) -> str:
        return self.value
