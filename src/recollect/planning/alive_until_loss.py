"""Find values alive until the loss whatever the plan (such as a cache of keys and values), and add options with them.

The model's own code holds these values, so keeping them costs memory in backward only. An option therefore has two
sizes: the bytes it keeps, and the bytes it keeps besides these values.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from recollect.planning.hull import Evaluator, Option
from recollect.profile.events import ALLOC, DIES, FORWARD, OP, PHASE, WORK, Event
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile

# If a unit holds more values than this, they are kept or dropped together.
_MOST_HELD_APART = 2


HeldValues = Sequence[frozenset[int]]
"""For each graph of a profile, by index; or nothing."""


def layers_hold(profile: Profile, held: HeldValues) -> bool:
    """Return whether layers save values that are alive until the loss, besides their outputs."""
    graphs = [(profile.graph_of(call), held[call.graph]) for call in profile.calls if call.repeated]
    return any(graph.values[v].saved and not graph.values[v].is_output for graph, values in graphs for v in values)


def held_values(profile: Profile) -> tuple[frozenset[int], ...]:
    """Return, for each graph, the produced values that stay alive until the loss in every call, even if dropped.

    The loss of a call is the last work of the forward that it is in.
    """
    made: dict[int, set[int]] = {}
    for forward in _forwards(profile):
        last_work = max((at for at, event in enumerate(forward) if event[0] in (OP, ALLOC, WORK)), default=len(forward))
        here = {event[1] for event in forward if event[0] == OP}
        for event in forward[:last_work]:
            if event[0] == OP:
                op = profile.graph_of(profile.calls[event[1]]).ops[event[2]]
                made.setdefault(event[1], set()).difference_update(op.inputs[:1] if op.mutates else ())
                made[event[1]].update(op.outputs)
            elif event[0] == DIES and event[1] in here:
                made.get(event[1], set()).discard(event[2])
    alive: dict[int, set[int]] = {}
    for index, call in enumerate(profile.calls):
        alive[call.graph] = made.get(index, set()) & alive.get(call.graph, made.get(index, set()))
    return tuple(frozenset(alive.get(graph, ())) for graph in range(len(profile.graphs)))


def _forwards(profile: Profile) -> Iterator[list[Event]]:
    events: list[Event] = []
    phase = FORWARD
    for event in profile.log.events:
        if event[0] == PHASE:
            phase = event[1]
        if phase == FORWARD:
            events.append(event)
        elif events:
            yield events
            events = []
    if events:
        yield events


def with_held(
    graph: UnitGraph, options: Iterable[Option], held: frozenset[int], *, keeps_output: bool = True
) -> tuple[Option, ...]:
    """Return the options, sorted by bytes, plus variants that keep other subsets of the held values.

    Variants are those that no other beats in bytes, bytes besides the held values, and seconds. Many held values are kept all
    or none.
    """
    evaluator = Evaluator(graph, keeps_output=keeps_output)
    given = {option.stored: option for option in options}
    inner = frozenset(v for v in held if not graph.values[v].is_output)
    varied = (
        evaluator.option((stored.whole - inner) | kept, stored.parts) for stored in given for kept in _subsets(inner)
    )
    candidates = {**{option.stored: option for option in varied}, **given}
    chosen: list[tuple[int, float, Option]] = []
    order = sorted(candidates.values(), key=lambda o: (o.kept_bytes, o.recompute_s, o.stored.order))
    for option in order:
        numbers = option.kept_bytes - held_bytes(graph, option, held), option.recompute_s
        is_beaten = any(other[0] <= numbers[0] and other[1] <= numbers[1] for other in chosen)
        if option.stored in given or not is_beaten:
            chosen.append((*numbers, option))
    return tuple(option for *_, option in chosen)


def held_bytes(graph: UnitGraph, option: Option, held: frozenset[int]) -> int:
    return sum(graph.values[v].nbytes for v in option.stored.whole & held)


def _subsets(values: frozenset[int]) -> Iterator[frozenset[int]]:
    sizes = range(len(values) + 1) if len(values) <= _MOST_HELD_APART else (0, len(values))
    for size in sizes:
        yield from map(frozenset, combinations(sorted(values), size))
