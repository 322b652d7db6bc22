"""Simulate a recorded step under a policy, as the recording ran it, instead of a plan."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Container, Mapping
from dataclasses import replace

from recollect.engine.policy import Policy
from recollect.plans.unit_plan import UnitPlan
from recollect.profile import events
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions, decide_call, drop_all
from recollect.simulation.playback import Playback, Token
from recollect.simulation.program import Key, Program
from recollect.simulation.simulate import Simulation, run, simulate


def leanest_of(profile: Profile, graphs: Container[int]) -> Simulation:
    """Simulate the step in which calls of some graphs drop all they can but their outputs, and the others nothing."""
    return simulate(
        profile,
        [drop_all(profile.graph_of(call)) if call.graph in graphs else CallActions() for call in profile.calls],
    )


def in_one_backward(profile: Profile) -> Profile:
    """Return the profile of the same step with a backward that uses its graph up, in which no op runs again twice.

    A unit is timed so; in the step, halves of a backward may each run an op again.
    """
    blocks = tuple(
        tuple(
            (events.USE, *event[1:]) if event[0] == events.PEEK else event
            for event in block
            if event[0] not in (events.GIVE_BACK, events.LET_GO)
        )
        for block in profile.log.blocks
    )
    return replace(profile, log=replace(profile.log, blocks=blocks))


def recorded_under(profile: Profile, policy: Policy) -> Simulation:
    """Simulate the step as a recording runs it: all units on a tape that follows a policy, and that copies what it holds."""
    known: dict[tuple[int, str], CallActions] = {}
    for call in profile.calls:
        if (call.graph, call.path) not in known:
            graph = profile.graph_of(call)
            names = (value.name for value in graph.values if value.producer is not None)
            unit = UnitPlan({name: policy.action(call.path, name) for name in names}, policy.output_action(call.path))
            known[call.graph, call.path] = decide_call(graph, unit)
    decisions = dict(enumerate(known[call.graph, call.path] for call in profile.calls))
    return run(_Copying(Program(profile), decisions, frozenset(decisions)))


class _Copy(Token):
    """Bytes of a copy, which all that hold it share."""

    __slots__ = ("__weakref__",)


class _Copying(Playback):
    """Plays a step whose tape holds copies of what the model has, for as long as anything needs them."""

    def __init__(self, program: Program, decisions: Mapping[int, CallActions], on_tape: Collection[int]) -> None:
        super().__init__(program, decisions, on_tape)
        self._copies: weakref.WeakValueDictionary[Key, _Copy] = weakref.WeakValueDictionary()

    def bytes_of(self, key: Key) -> object:
        """Return a copy."""
        own = self.tensors.get(key)
        if not isinstance(own, Token):
            return super().bytes_of(key)
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = _Copy(self, own.nbytes, key)
        return copy
