"""Modules of which a plan drops nothing run past the tape once it knows them; gradients, bytes and errors stay the same."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import recollect
from blocks import Computes, mean_square
from gradients import assert_same_gradients, gradients
from policies import Only
from recollect.applying import apply_policy
from recollect.engine.function_mode import FunctionMode
from recollect.engine.tape import Tape
from recollect.errors import MutatedValueError
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from watch import Watch

WIDTH = 16
DROPS_THE_NORM = Only(frozenset({"norm.mul", "norm.mul#1", "norm.native_layer_norm.0"}))


def layer(between: nn.Module) -> Computes:
    """A norm, which plans of these tests drop; then whatever a test asks for, and a linear."""
    norm, linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    return Computes(
        lambda self, x: x + self.linear(self.between(self.norm(x))).sigmoid(), norm=norm, between=between, linear=linear
    )


class _CountingMode(FunctionMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tape.seen[self.scope] += 1  # type: ignore[attr-defined]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def pack(self, tensor: Tensor) -> Any:
        self.tape.packed[self.scope] += 1  # type: ignore[attr-defined]
        return super().pack(tensor)


class CountingTape(Tape):
    """Counts ops and saved tensors, by module."""

    def __init__(self) -> None:
        super().__init__(DROPS_THE_NORM)
        self.seen: Counter[str] = Counter()
        self.packed: Counter[str] = Counter()

    def new_mode(self, unit_path: str) -> FunctionMode:
        return _CountingMode(self, unit_path)


def calls(function: Callable[[Tensor], Tensor]) -> Computes:
    return Computes(lambda _, hidden: function(hidden))


def model_of(between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(layer(between), layer(between))


def batch() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def step_keeps(model: nn.Module) -> int:
    """Bytes that forward leaves in memory for backward, which runs as well."""
    with Watch() as watch:
        loss = mean_square(model(batch()))
        kept_bytes = watch.live_bytes()
    loss.backward()
    model.zero_grad(set_to_none=True)
    return kept_bytes


def counted_steps(model: nn.Module, num_steps: int) -> list[tuple[Counter[str], Counter[str]]]:
    """Steps whose gradients are those of the plain model; for each, the ops that were seen and the tensors packed."""
    expected = gradients(model, batch(), mean_square)
    tape, counts = CountingTape(), []
    with apply_policy(model, ["0", "1"], tape):
        for _ in range(num_steps):
            tape.seen.clear()
            tape.packed.clear()
            assert_same_gradients(expected, gradients(model, batch(), mean_square))
            counts.append((tape.seen.copy(), tape.packed.copy()))
    return counts


def test_only_what_drops_is_seen_and_only_what_saves_it_is_packed() -> None:
    steps = counted_steps(model_of(nn.Tanh()), 4)
    for seen, packed in steps[:2]:
        assert set(seen) == {"", "norm", "between", "linear"}
        assert {"norm", "between", "linear"} <= set(packed)
    for seen, packed in steps[2:]:
        assert set(seen) == {"norm"}
        # The linear saves what tanh made, tanh its own result: neither is dropped.
        assert not packed
    assert steps[2][0]["norm"] == steps[0][0]["norm"]


def test_a_view_of_what_is_dropped_is_known_where_no_op_is_seen() -> None:
    steps = counted_steps(model_of(calls(lambda hidden: hidden.view(2, 2, WIDTH).flatten(0, 1))), 4)
    seen, packed = steps[-1]
    assert set(seen) == {"norm"}
    assert set(packed) == {"linear"}


def test_modules_that_write_in_place_stay_in_sight() -> None:
    steps = counted_steps(model_of(nn.ReLU(inplace=True)), 4)
    seen, _ = steps[-1]
    assert set(seen) == {"norm", "between"}


def test_modules_that_update_statistics_unseen_stay_in_sight() -> None:
    """Batch norm raises no version, and its statistics are too many to be compared."""
    normed = Computes(
        lambda self, x: (x * self.weight - self.mean).sin() + self.norm(x),
        weight=nn.Parameter(torch.ones(2048)),
        mean=torch.zeros(2048),
        norm=calls(lambda x: F.batch_norm(x, normed.mean, torch.ones(2048), training=True)),
    )
    model, data = nn.Sequential(normed), torch.randn(4, 2048)
    expected = gradients(model, data, mean_square)
    with apply_policy(model, ["0"], Only(frozenset({"sub"}))):
        for _ in range(4):
            assert_same_gradients(expected, gradients(model, data, mean_square))


def test_a_write_that_begins_later_is_an_error() -> None:
    """The tape does not see it, but what it holds of the tensor has another version then."""
    writes = False

    def write(hidden: Tensor) -> Tensor:
        if writes:
            with torch.no_grad():
                hidden.add_(1.0)
        return hidden * 2

    def exponential(self: Any, hidden: Tensor) -> Any:
        hidden = self.linear(hidden)
        return self.act(hidden) + self.writer(hidden)

    parts = {"linear": nn.Linear(WIDTH, WIDTH), "act": calls(torch.exp), "writer": calls(write)}
    model = nn.Sequential(Computes(exponential, **parts))
    expected = gradients(model, batch(), mean_square)
    # Computing the exponential again takes what the linear made.
    with apply_policy(model, ["0"], Only(frozenset({"act.exp"}))):
        for _ in range(3):
            assert_same_gradients(expected, gradients(model, batch(), mean_square))
        writes = True
        with pytest.raises(MutatedValueError):
            gradients(model, batch(), mean_square)


@pytest.mark.filterwarnings("ignore:recollect. hooks for saved tensors")
def test_hooks_around_the_model_see_no_more_than_before() -> None:
    """A checkpoint around several units counts what is saved: the count must not change from step to step."""
    model = model_of(nn.Tanh())
    counts = []
    with apply_policy(model, ["0", "1"], CountingTape()):
        for _ in range(4):
            seen: list[Tensor] = []

            def pack(tensor: Tensor, seen: list[Tensor] = seen) -> Tensor:
                seen.append(tensor)
                return tensor

            with saved_tensors_hooks(pack, lambda tensor: tensor):
                gradients(model, batch(), mean_square)
            counts.append(len(seen))
    assert len(set(counts)) == 1


def test_kept_bytes_are_the_same_in_every_step() -> None:
    model = model_of(nn.Tanh())
    kept = []
    with apply_policy(model, ["0", "1"], DROPS_THE_NORM):
        for _ in range(4):
            kept.append(step_keeps(model))
    assert len(set(kept)) == 1, kept


def test_a_unit_that_gets_a_dropped_output_the_second_time_only() -> None:
    model = Computes(lambda self, x: self.layer(self.layer(x)), layer=layer(nn.Tanh()))
    expected = gradients(model, batch(), mean_square)
    kept = []
    policy = Only(frozenset({"add", "sigmoid", "norm.native_layer_norm.0"}), output=Action.RECOMPUTE)
    for tape in (Tape(policy, runs_to_settle=10**9), Tape(policy)):
        with apply_policy(model, ["layer"], tape):
            for _ in range(4):
                kept.append(step_keeps(model))
                assert_same_gradients(expected, gradients(model, batch(), mean_square))
    assert len(set(kept)) == 1, kept


def test_short_runs_tell_nothing_of_what_only_long_ones_drop() -> None:
    length = 8

    def recurrent(hidden: Tensor) -> Tensor:
        for _ in range(length):
            hidden = hidden.sin()
        return hidden

    unit = Computes(lambda self, x: self.loop(x), loop=calls(recurrent))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), unit)
    plan = Plan(
        {"1": UnitPlan({f"loop.sin#{n}" if n else "loop.sin": "recompute" if n > 2 else "keep" for n in range(8)})}
    )
    kept = []
    for lengths in ([8], [2, 2, 2, 8]):
        with recollect.apply(model, plan):
            for length in lengths:  # noqa: B007
                now = step_keeps(model)
        kept.append(now)
    assert kept[0] == kept[1]


def test_a_module_that_fails_leaves_the_tape_in_order() -> None:
    fails = False

    def between(hidden: Tensor) -> Tensor:
        if fails:
            raise ValueError("no")
        return hidden.tanh()

    def forgiving(self: Any, hidden: Tensor) -> Any:
        try:
            inner = self.layer.between(self.layer.norm(hidden))
        except ValueError:
            inner = hidden.cos()
        return self.layer.linear(inner)

    model = nn.Sequential(Computes(forgiving, layer=layer(calls(between))))
    policy = Only(frozenset({"layer.norm.native_layer_norm.0"}))
    expected = {}
    for fails in (False, True):
        expected[fails] = gradients(model, batch(), mean_square)
    with apply_policy(model, ["0"], policy):
        for fails in (True, False, False, False, True, False):
            assert_same_gradients(expected[fails], gradients(model, batch(), mean_square))


@pytest.mark.filterwarnings("ignore:recollect. torch.utils.checkpoint has no effect")
def test_a_checkpoint_that_begins_later_inside_a_unit() -> None:
    checkpoints = False

    def checkpointed(self: Any, hidden: Tensor) -> Any:
        hidden = hidden.cos()
        return checkpoint(self.layer, hidden, use_reentrant=False) if checkpoints else self.layer(hidden)

    model = nn.Sequential(Computes(checkpointed, layer=layer(nn.Identity())))
    expected = gradients(model, batch(), mean_square)
    # The linear saves what the norm makes, so that its saved tensors go through the tape's hooks, and the norm's do not.
    with apply_policy(model, ["0"], Only(frozenset({"layer.norm.native_layer_norm.0"}))):
        for is_on in (False, False, False, True, True, False):
            checkpoints = is_on
            assert_same_gradients(expected, gradients(model, batch(), mean_square))


def test_modes_of_the_model_s_own_see_what_they_see_without_the_tape() -> None:
    flops: list[int] = []

    def counting(hidden: Tensor) -> Tensor:
        with FlopCounterMode(display=False) as counter:
            result = hidden @ hidden.t() @ hidden
        flops.append(counter.get_total_flops())
        return result

    model = model_of(calls(counting))
    counted_steps(model, 4)
    assert len(set(flops)) == 1
    assert flops[0] > 0
