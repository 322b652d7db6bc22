"""Steps that a device runs behind its host, from steps with one clock."""

from dataclasses import replace

from recollect.plans.value_names import module_of
from recollect.profile.events import WORK, Event, StepLog
from recollect.profile.graph import UnitGraph
from recollect.profile.host_times import HostTimes
from recollect.profile.profile import Profile
from recollect.simulation.clocks import step_times
from recollect.simulation.decisions import CallActions

_WORK_NS = 10_000_000


def on_host(profile: Profile, host: HostTimes) -> Profile:
    """The same step with a host that takes time around ops; an untimed op outside of units takes 10 ms."""

    def of_graph(graph: UnitGraph) -> UnitGraph:
        modules = [module_of(op.name) for op in graph.ops]
        watching = tuple((m, modules.count(m) * host.seen_op_s) for m in dict.fromkeys(modules))
        tape_s = host.tape_s(len({*modules} - {""}))
        return replace(graph, tape_s=tape_s, module_tape_s=watching, again_op_s=host.again_op_s)

    def timed(event: Event) -> Event:
        return (*event, _WORK_NS) if event[0] == WORK and len(event) == 2 else event

    graphs = tuple(map(of_graph, profile.graphs))
    found = replace(profile, graphs=graphs, log=StepLog(tuple(map(timed, profile.log.events))), host=host)
    return replace(found, step_s=step_times(found, [CallActions()] * len(found.calls)).step_s)
