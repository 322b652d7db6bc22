"""Moves offloaded values out and back at the edges of units, as `recollect.simulation.windows` predicts them.

Units' calls are numbered from the first one after a backward. While one runs, each tensor that autograd saves is marked with
its number, which tells backward the call that it has come to: the last one with unused marks left.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from recollect._torch_private import current_backward, is_capturing, is_fake_tensor, keeps_graph
from recollect.engine.captured import refused
from recollect.engine.offload.carriers import Host
from recollect.engine.offload.offloaded import Offloaded
from recollect.engine.subclasses import strided_tensors
from recollect.errors import BudgetWarning
from recollect.plans.trip import Timetable, Trip
from recollect.plans.unit_plan import UnitPlan
from recollect.warning import warn_user

# On storages that no step makes.
_CONSTANT = "_recollect_constant"
# Of values that the plan does not name, but others like them.
_NEXT = Trip()
# After this many calls that save nothing, assume none will.
_MOST_UNMARKED = 1000


class HostUse(NamedTuple):
    """The cost of an applied plan's offloaded values so far.

    Attributes:
        most_bytes: the most bytes ever in host memory at the same time.
        stalled_s: seconds that computation has waited for copies, on the CPU.
        num_missed: values that were asked for, or written to, at a different moment than the plan says.
        num_stayed: values that stayed on the device, as there was no room for them in host memory.
        sent_bytes: bytes that left the device in all steps so far, by the path of the unit.
    """

    most_bytes: int
    stalled_s: float
    num_missed: int
    num_stayed: int
    sent_bytes: Mapping[str, int]


class Offload:
    """An applied plan's state for its offloaded values.

    Args:
        model: the model that the plan is applied to; its parameters give the device. None: nothing is known of it.
        most_bytes: the host memory that values need; None if unknown.
        device: where values are computed, if not as the parameters tell.
    """

    def __init__(
        self,
        model: nn.Module | None,
        units: Mapping[str, UnitPlan],
        most_bytes: int | None,
        *,
        device: torch.device | None = None,
    ) -> None:
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self._units = units
        if device is None:
            parameters = model.parameters() if model is not None else ()
            device = next((parameter.device for parameter in parameters), torch.device("cpu"))
        self.host = Host(device, most_bytes)
        self.num_stayed = 0
        self._sent_bytes: Counter[str] = Counter()
        self._flight = Flight()

    def use(self) -> HostUse:
        host = self.host
        sent_bytes = dict(self._sent_bytes)
        return HostUse(host.pool.most_taken_bytes, host.stalled_s, host.num_missed, self.num_stayed, sent_bytes)

    def begin_call(self, *, is_inside: bool) -> Place:
        """Return the flight that a unit's call belongs to, and its number there; `is_inside`: another unit's call runs."""
        if is_capturing():
            raise refused(
                "action",
                "offload",
                "the host decides in each step where and when values are copied, and a graph would repeat the copies of one",
                "Make the plan without host_budget",
            )
        if self._flight.has_turned or (self._flight.is_over and not is_inside):
            self._flight = Flight()
        self._flight.is_running = True
        call = self._flight.begin_call()
        if not call and (model := self._model()) is not None:
            for tensor in strided_tensors([*model.parameters(), *model.buffers()]):
                vars(tensor.untyped_storage())[_CONSTANT] = True
        return self._flight, call

    def send(self, tensor: torch.Tensor, unit: str, name: str, place: Place) -> Offloaded | None:
        """Begin to copy a value that was just computed; None if there is no room for it, or nothing to copy."""
        nbytes = tensor.untyped_storage().nbytes()
        if not nbytes or tensor.device.type != self.host.device.type or is_fake_tensor(tensor):
            return None
        slot = self.host.pool.take(nbytes)
        if slot is None:
            self._warn_that_it_stays(unit, name)
            return None
        sent = Offloaded(self.host, tensor, slot, (unit, name))
        self._sent_bytes[unit] += nbytes
        flight, call = place
        planned = self._units.get(unit)
        flight.add(sent, call, _NEXT if planned is None else planned.trips.get(name, _NEXT))
        return sent

    def _warn_that_it_stays(self, unit: str, name: str) -> None:
        if not self.num_stayed:
            warn_user(
                f"offload: host memory for the plan is full, so {name!r} of {unit!r} stays on the device, as may others: more "
                "memory is used than was predicted. Steps that hold several graphs at once need it several times; record such "
                "a step and make a new plan.",
                BudgetWarning,
            )
        self.num_stayed += 1


class Flight:
    """A stretch of forward, with the backwards over it."""

    def __init__(self) -> None:
        self.timetable = Timetable()
        self.has_turned = False
        self.is_running = False
        self._num_calls = 0
        # Of each call: marks that are left, and those that this backward has not used.
        self._marks: Counter[int] = Counter()
        self._waiting: Counter[int] = Counter()
        self._num_marks = 0
        self._last = -1
        self._backward = -1
        self._may_repeat = False
        # The call that this backward has reached.
        self._reached = -1

    @property
    def is_over(self) -> bool:
        """Whether no backward will reach it, since everything that autograd saved is gone."""
        return not self._num_marks and (self._last >= 0 or self._num_calls > _MOST_UNMARKED)

    def begin_call(self) -> int:
        call = self._num_calls
        self._num_calls += 1
        self.timetable.forward(call)
        return call

    def end_call(self, call: int) -> None:
        """Note that a call returns: the next one can begin now."""
        if not self.has_turned and call + 1 == self._num_calls:
            self.timetable.forward(call + 1)

    def add(self, sent: Offloaded, call: int, trip: Trip) -> None:
        self.timetable.add(sent, call, trip)
        # Backward may be under way already, as in a forward that computes its own gradients.
        self._reached = -1

    def mark(self, packed: Any, call: int) -> Mark:
        self._num_marks += 1
        self._marks[call] += 1
        self._waiting[call] += 1
        self._last = max(self._last, call)
        return Mark(self, packed, call)

    def use(self, call: int, used: int) -> int:
        """Note that backward asks for something saved in a call, and advance to that call."""
        backward = current_backward()
        if backward != self._backward:
            if self._may_repeat:
                # The next backward over a graph that the last one kept.
                self._waiting = Counter(self._marks)
                self._last = max(self._marks, default=-1)
                self._reached = -1
                self.timetable.begin_again()
            self._backward, self._may_repeat = backward, keeps_graph()
            self.has_turned = True
        while self._last > 0 and not self._waiting[self._last]:
            self._last -= 1
        if self._last != self._reached:
            self._reached = self._last
            self.timetable.backward(self._last)
        if used != backward:
            self._waiting[call] -= 1
        return backward

    def forget(self, call: int, used: int) -> None:
        self._num_marks -= 1
        self._marks[call] -= 1
        if used != self._backward or used < 0:
            self._waiting[call] -= 1
        if not self._num_marks and not self.is_running:
            self.timetable.end()

    def __del__(self) -> None:
        try:
            self.timetable.end()
        except Exception:  # noqa: S110
            pass  # Python is about to end.


Place: TypeAlias = tuple[Flight, int]
"""Where a unit's call is: its flight, and its number there."""


class Mark:
    """Stands in for a tensor that autograd saves; unpacking it shows where backward is."""

    __slots__ = ("_call", "_flight", "_packed", "_used")

    def __init__(self, flight: Flight, packed: Any, call: int) -> None:
        self._flight, self._packed, self._call = flight, packed, call
        self._used = -1

    def rebuild(self, unpack: Any) -> torch.Tensor:
        self._used = self._flight.use(self._call, self._used)
        return unpack(self._packed)

    def __del__(self) -> None:
        self._flight.forget(self._call, self._used)


def is_constant(tensor: torch.Tensor) -> bool:
    """Whether no step makes this tensor, as for a parameter: saving it tells nothing about where backward is."""
    return tensor.layout is torch.strided and _CONSTANT in vars(tensor.untyped_storage())
