"""What a step leaves behind, and when the next step replaces it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import recollect
from recollect.measuring.meter import measure_peak, storage_bytes
from recollect.profile.events import ALLOC, BACKWARD, FORWARD, FREE, OP, OPTIMIZER, PHASE, RELEASE, SAVE, SUM
from recollect.recording.next_step import Phases, leftovers, with_last_step
from recollect.recording.step_recorder import RecordedCall, RecordedOp, RecordedValue


def test_leftovers_are_what_never_dies_and_what_autograd_still_holds() -> None:
    call = RecordedCall("layer")
    call.values = [
        RecordedValue("input 0", 8, producer=None),
        *(RecordedValue(f"v{i}", 4, producer=i) for i in range(3)),
    ]
    call.ops = [RecordedOp("a", (0,), (1,), None), RecordedOp("b_", (1,), (2,), None, mutates=True)]
    recorded = [
        (ALLOC, 0, 16), (OP, 0, 0), (OP, 0, 1), (SAVE, 0, 1, 0, 0), (SAVE, 0, 0, 1, 0), (ALLOC, 1, 32), (FREE, 0),
        (SAVE, 0, 2, 2, 0), (RELEASE, 2), (SUM, 2, 1, 64),
    ]  # fmt: skip
    found = leftovers(recorded, [call])
    assert found.storages == {1: 32, 2: 64}
    assert found.values == {(0, 2): 4, (0, 1): 4}, "the value written to, and the one that a graph still holds"
    assert found.made_at == {1: 5, 2: 9, (0, 1): 1, (0, 2): 2}
    assert found.total_bytes == 104


def test_the_last_step_is_alive_until_it_is_replaced() -> None:
    recorded = [(PHASE, FORWARD), (ALLOC, 0, 8), (PHASE, BACKWARD), (FREE, 0), (PHASE, OPTIMIZER)]
    assert with_last_step(recorded, {7: (8, 2), 8: (4, 5)}) == [
        (ALLOC, 7, 8), (ALLOC, 8, 4), (PHASE, FORWARD), (ALLOC, 0, 8), (FREE, 7), (PHASE, BACKWARD), (FREE, 0),
        (PHASE, OPTIMIZER), (FREE, 8),
    ]  # fmt: skip
    phases = Phases(recorded)
    assert phases.first_backward == phases.next_after(1) == 2
    assert phases.next_after(2) == 4
    assert phases.next_after(4) == 5


class Stack(nn.Module):
    """Three layers. [n, 32] -> [n, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_loop_that_holds_two_outputs_and_a_gradient_of_its_input_is_predicted() -> None:
    torch.manual_seed(0)
    model = Stack()
    x = torch.randn(256, 32, requires_grad=True)
    held: dict[str, Tensor] = {}

    def step() -> None:
        held["one"] = model(x)
        (held["gradient"],) = torch.autograd.grad(held["one"].sum(), x, create_graph=True)
        held["other"] = model(x)
        held["loss"] = held["other"].square().mean() + held["gradient"].square().mean()
        model.zero_grad()
        held["loss"].backward()

    profile = recollect.record(model, step=step)
    start_bytes = storage_bytes([*model.parameters(), x])
    for kind in ("keep_all", "full"):
        plan = recollect.classic_plan(profile, kind)  # type: ignore[arg-type]
        held.clear()
        model.zero_grad()
        x.grad = None
        with recollect.apply(model, plan):

            def two_steps() -> None:
                step()
                model.zero_grad()
                x.grad = None
                step()

            measured = measure_peak(two_steps, device="cpu", baseline_bytes=start_bytes).peak_bytes
        assert plan.predicted_peak_bytes is not None
        # The gradient that backward makes of the input is not the model's.
        assert 0 <= plan.predicted_peak_bytes - measured <= 2048 + x.nbytes, kind
