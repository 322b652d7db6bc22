"""Gives storages readable names: by the value that they hold, or by what runs when they are made."""

from collections.abc import Mapping

from recollect.plans.paths import expand_classes
from recollect.plans.text import classes_within, is_empty, summarise_names
from recollect.profile.events import BACKWARD, FORWARD, OPTIMIZER
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.lifetimes import LOSS, Lifetime, Lifetimes
from recollect.simulation.playback import COMPILED, GENERATOR, OUTSIDE


class StorageNames:
    """Names the storages that are alive in a step.

    Attributes:
        classes: of modules that have a number for a name, by path.
    """

    def __init__(self, profile: Profile, lives: Lifetimes) -> None:
        self.classes = expand_classes(profile.class_names)
        self._profile = profile
        self._phases = lives.phases
        self._of_graph: dict[int, list[str]] = {}

    def of(self, storage: Lifetime, category: str) -> str:
        """Return a storage's name, without the path of its unit."""
        owner, index = storage.owner
        phase = int(self._phases[storage.born])
        if storage.op is not None:
            op = "an op of backward" if phase == BACKWARD else "an op outside of the units"
            return f"while {storage.op or op} runs"
        if owner == GENERATOR:
            return "states of the random generator"
        if owner == COMPILED:
            return "what compiled code keeps besides"
        if owner == OUTSIDE:
            return _outside(category, phase)
        call = self._profile.calls[owner]
        if call.graph not in self._of_graph:
            graph, classes = self._profile.graph_of(call), classes_within(call.path, self.classes)
            self._of_graph[call.graph] = _value_names(graph, classes)
        return self._of_graph[call.graph][index]


def _outside(category: str, phase: int) -> str:
    if category == "gradients":
        return "gradients of the last step" if phase == FORWARD else "gradients of parameters"
    if phase == LOSS:
        return "the loss, and what it saves"
    if phase == BACKWARD:
        return "gradients of values, and other results of backward"
    return "temporaries of the optimizer step" if phase == OPTIMIZER else "what runs between the units"


def _value_names(graph: UnitGraph, classes: Mapping[str, str]) -> list[str]:
    """Return a short name for each value of a unit; memory that an op fills has the name of what fills it."""
    names = [value.name for value in graph.values]
    for op in reversed(graph.ops):
        if op.mutates and is_empty(names[op.inputs[0]]):
            names[op.inputs[0]] = names[op.outputs[0]]
    made = {name: name for name, value in zip(names, graph.values, strict=True) if value.producer is not None}
    short = {name: " ".join(words) for name, words in summarise_names(made, classes).items()}
    # "all" means that this is the unit's only value.
    return [name.rpartition(".")[2] if short.get(name) == "all" else short.get(name, name) for name in names]
