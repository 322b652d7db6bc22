"""What a collective moves, and between whom, from the op that starts it."""

from __future__ import annotations

from typing import Any, NamedTuple

from recollect._torch_parallel import group_ranks
from recollect.costs.links import CollectiveKind
from recollect.tensors import tensors_in

__all__ = ["Collective", "collective_of", "ends_collective"]

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


class Collective(NamedTuple):
    """A collective: its kind, the bytes of its whole tensor, and the ranks that take part."""

    kind: CollectiveKind
    nbytes: int
    ranks: tuple[int, ...]


def collective_of(func: Any, args: Any, output: Any) -> Collective | None:
    """Return what an op moves; None for one that is no collective.

    Args:
        func: the op overload.
        args: its positional arguments.
        output: its result.
    """
    found = _OPS.get(_name(func))
    if found is None:
        return None
    kind, position = found
    whole = tensors_in(output if position < 0 else args[position])
    return Collective(kind, sum(t.numel() * t.element_size() for t in whole), group_ranks(args))


def ends_collective(func: Any) -> bool:
    """Whether an op only waits for a collective that has begun."""
    return _name(func) == "_c10d_functional::wait_tensor"


def _name(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    return "" if schema is None else str(schema.name)
