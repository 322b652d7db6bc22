"""Model the costs of ops on fake tensors, where nothing can be measured; of collectives from their bytes and ranks.

See `op_costs.py` for ops that really run, `op_work.py` for the work of an op, `roofline.py` for its time.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from recollect._torch_parallel import group_ranks
from recollect.costs.hardware import Hardware
from recollect.costs.links import Cluster, CollectiveKind
from recollect.costs.op_costs import Key, OpRun, RunsAgain, key_of
from recollect.costs.op_work import work_of
from recollect.costs.roofline import Work, seconds
from recollect.engine.facts import OpFacts
from recollect.tensors import tensors_in

# By the names of both families of ops, functional ones and those that write in place: the kind, and which argument is whole;
# -1 stands for the result.
_OPS: dict[str, tuple[CollectiveKind, int]] = {
    "_c10d_functional::all_gather_into_tensor": ("all_gather", -1),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", -1),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::alltoall_base_": ("all_to_all", 1),
}
_WAIT = "_c10d_functional::wait_tensor"


class Collective(NamedTuple):
    """A collective: its kind, the bytes of its whole tensor, and the ranks that take part."""

    kind: CollectiveKind
    nbytes: int
    ranks: tuple[int, ...]


def collective_of(func: Any, args: Any, output: Any) -> Collective | None:
    """Return the traffic of an op; None unless it is a collective."""
    found = _OPS.get(_name(func))
    if found is None:
        return None
    kind, position = found
    whole = tensors_in(output if position < 0 else args[position])
    return Collective(kind, sum(t.numel() * t.element_size() for t in whole), group_ranks(args))


def _name(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    return "" if schema is None else str(schema.name)


@dataclass
class Traffic:
    """The traffic of a group of ranks in the recorded step."""

    count: int = 0
    """Collectives."""
    nbytes: int = 0
    """Bytes of the whole tensors that they gather, reduce or exchange."""
    time_s: float = 0.0


class ModelledCosts:
    """Runs ops on fake tensors and models their times on some hardware.

    Args:
        cluster: how devices are connected, for the times of collectives; None: they take as long as their copies.
        hidden: groups of ranks whose collectives run in parallel with the computation, and add nothing to the step.

    Attributes:
        traffic: the traffic of the recorded step, by the ranks of each group, hidden or not.
    """

    def __init__(
        self, hardware: Hardware, cluster: Cluster | None = None, *, hidden: Iterable[tuple[int, ...]] = ()
    ) -> None:
        self.hardware = hardware
        self.traffic: defaultdict[tuple[int, ...], Traffic] = defaultdict(Traffic)
        self._cluster = cluster
        self._hidden = frozenset(hidden)
        self._seconds: dict[Key, float] = {}

    @contextmanager
    def recording(self, before: object = None) -> Iterator[None]:
        self.traffic.clear()
        yield

    def run(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, *, may_repeat: bool) -> tuple[Any, OpRun]:
        """Run an op on fake tensors; return its result and the key to its costs."""
        output = func(*args, **kwargs)
        key = key_of(func, args, kwargs)
        if self._cluster is not None:
            if (collective := collective_of(func, args, output)) is not None:
                return output, self._run_collective(collective, key, self._cluster)
            if _name(func) == _WAIT:  # for one that has begun
                self._seconds[key] = 0.0
        if key not in self._seconds:
            self._seconds[key] = seconds(work_of(func, facts, args, kwargs, output), self.hardware)
        return output, OpRun(key, 0)

    def _run_collective(self, collective: Collective, key: Key, cluster: Cluster) -> OpRun:
        time_s = cluster.collective_s(*collective)
        found = self.traffic[collective.ranks]
        found.count += 1
        found.nbytes += collective.nbytes
        found.time_s += time_s
        # Groups passed as objects do not show in the key.
        key = (*key, collective.ranks)
        self._seconds[key] = 0.0 if collective.ranks in self._hidden else time_s
        return OpRun(key, 0)

    def run_function(self, args: Any, inner: Sequence[OpRun], again: RunsAgain, *, is_joint: bool) -> OpRun:
        """Return the cost key of a custom autograd Function: the keys of the ops `inner` that it has run."""
        key = key_of(again.kind, args, {})
        self._seconds[key] = math.fsum(self._seconds[run.key] for run in inner)
        return OpRun(key, 0)

    def gather_s(self, nbytes: int, ranks: tuple[int, ...]) -> float:
        """Return the modelled time to gather a tensor of this many bytes from parts on each rank."""
        if self._cluster is not None:
            return self._cluster.collective_s("all_gather", nbytes, ranks)
        return seconds(Work("copy", 2.0 * nbytes, float(nbytes)), self.hardware)

    def seconds_of(self, run: OpRun | None) -> float:
        return self._seconds[run.key] if run is not None else 0.0

    def working_bytes_of(self, key: Key | None) -> int:
        """Return 0: without kernels there are no workspaces, and the results count anyway."""
        return 0
