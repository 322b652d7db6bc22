"""Turn the record of a step into a `Profile`."""

import math
from collections.abc import Callable
from typing import Any, Final

from recollect.costs.op_costs import OpRun
from recollect.profile import events
from recollect.profile.events import Event, StepLog
from recollect.profile.graph import OpRecord, PartRecord, UnitCall, UnitGraph, ValueRecord
from recollect.profile.host_times import NOTHING, AroundOps, HostTimes
from recollect.profile.profile import Profile
from recollect.recording.replicated_values import RanksWithParts
from recollect.recording.step_recorder import Costs, StepRecorder
from recollect.recording.trackers import RecordedCall
from recollect.warning import warn_user

_DERIVED: Final = (
    "a backward builds a graph of its own through it (create_graph), and a trace has no second derivatives"
)


def assemble(
    recorder: StepRecorder,
    costs: Costs,
    layers: set[str],
    *,
    ranks: RanksWithParts | None = None,
    around: AroundOps = NOTHING,
    **facts: Any,
) -> Profile:
    """Return the profile; calls with equal graphs share one."""
    _warn_if_none_ran(layers, {call.path for call in recorder.calls}, facts.get("model_class", "the model"))
    graphs: dict[UnitGraph, int] = {}
    parts: list[tuple[PartRecord, ...]] = [()] * len(recorder.calls)
    if ranks is not None:
        parts, of_parts = ranks.told(recorder.calls)
        facts |= of_parts

    def seconds_of(run: OpRun | None) -> float:
        return max(0.0, costs.seconds_of(run) - around.recorded_s)

    derived = {call.path for call in recorder.calls if call.builds_graph}
    made = (
        _graph(call, costs, seconds_of, around.host, own, _DERIVED if call.path in derived else "")
        for call, own in zip(recorder.calls, parts, strict=True)
    )
    graph_of_call = [graphs.setdefault(graph, len(graphs)) for graph in made]
    sources = [{source for source, _ in call.sources} for call in recorder.calls]
    calls = tuple(
        UnitCall(
            path=call.path,
            graph=graph,
            repeated=call.path in layers,
            chained=not call.output_stays and index + 1 < len(sources) and index in sources[index + 1],
            origins=tuple((value, *source) for source, value in call.sources.items() if source[0] >= 0),
            outside=tuple((value, storage) for (source, storage), value in call.sources.items() if source < 0),
        )
        for index, (call, graph) in enumerate(zip(recorder.calls, graph_of_call, strict=True))
    )
    forward_s = [graph.forward_s for graph in graphs]
    step_s = math.fsum(forward_s[call.graph] for call in calls)
    step_s += math.fsum(seconds_of(run) for run in recorder.other_runs)
    log = StepLog(_resolved(recorder, costs, seconds_of))
    return Profile(graphs=tuple(graphs), calls=calls, log=log, step_s=step_s, **facts)


def _warn_if_none_ran(layers: set[str], ran: set[str], model_class: str) -> None:
    """Warn of a model that calls the parts of its layers one by one: nothing would be recomputed, without any error."""
    if not layers or layers & ran:
        return
    warn_user(
        f"none of the {len(layers)} layers of {model_class} ran, such as {min(layers)!r}: its forward does not call them, but "
        'perhaps what is in them, so they recompute nothing. Name modules that it calls, or plan it as one: units=[""].',
    )


def _resolved(recorder: StepRecorder, costs: Costs, seconds_of: Callable[[OpRun], float]) -> tuple[Event, ...]:
    """Return the events of a step without a recorder: with bytes and times of ops, and gradients summed in place."""
    resolved: list[Event] = []
    # The storage that holds a sum made in place: by the number of the sum's own storage; -1 for one that became a sum.
    same: dict[int, int] = {}
    recorded = recorder.events
    for (code, *operands), following in zip(recorded, [*recorded[1:], ()], strict=True):
        if code == events.WORK:
            run = recorder.other_runs[operands[0]]
            # SUM counts the memory of the sum itself.
            sum_bytes = following[-1] if following and following[0] == events.SUM else 0
            nbytes = max(0, costs.working_bytes_of(run.key) - sum_bytes)
            resolved.append((code, nbytes, round(1e9 * seconds_of(run))))
        elif code == events.SUM:
            storage, addend, nbytes = operands
            if following == (events.FREE, addend):
                same[storage] = same.get(addend, addend)
                same[addend] = -1
            else:
                resolved.append((events.ALLOC, storage, nbytes))
        elif code == events.FREE:
            storage = same.get(operands[0], operands[0])
            if storage >= 0:
                resolved.append((code, storage))
        else:
            resolved.append((code, *operands))
    return tuple(resolved)


def _graph(
    call: RecordedCall,
    costs: Costs,
    seconds_of: Callable[[OpRun | None], float],
    host: HostTimes,
    parts: tuple[PartRecord, ...],
    why_not_traced: str,
) -> UnitGraph:
    values = tuple(ValueRecord(**vars(value)) for value in call.values)
    ops = tuple(
        OpRecord(
            name=op.name,
            inputs=op.inputs,
            outputs=op.outputs,
            time_s=seconds_of(op.run),
            mutates=op.mutates,
            state_bytes=op.state_bytes,
            working_bytes=costs.working_bytes_of(None if op.run is None else op.run.key),
        )
        for op in call.ops
    )
    seen_s = host.seen_s([sum(call.values[value].nbytes for value in op.outputs) for op in call.ops])
    watching_s = {module: number * seen_s for module, number in call.seen_ops.items()}
    always_s = [watching_s.pop(module) for module in call.watched_modules & watching_s.keys()]
    return UnitGraph(
        values,
        ops,
        tape_s=math.fsum((host.tape_s(call.num_modules), *always_s)),
        module_tape_s=tuple(watching_s.items()),
        again_op_s=host.again_op_s,
        parts=parts,
        why_not_traced=why_not_traced,
    )
