"""What could come out differently in backward runs once, and what others write there is refused.

That units are exact is shown for all of them, in `tests/contracts`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blocks import Computes
from contract_steps import Run, plain
from contract_units import UNITS, Case, LayoutSine, layout_in_place
from engines import applied
from gradients import assert_same_gradients, gradients
from policies import FULL, KEEP_ALL, NOTHING_KEPT, Only, Policy, Random
from recollect.applying import apply_policy
from recollect.errors import MutatedValueError
from unseen_collectives import doubled_by_address, in_a_function, without_gradients
from watch import Watch

WIDTH = 8


def unit_of(function: Callable[[Tensor], Tensor]) -> Computes:
    """Runs a function of its weighted input, of [4, 8]."""
    weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH).sin())
    return Computes(lambda self, hidden: function(hidden @ self.weight), weight=weight)


def rows() -> Tensor:
    return torch.linspace(-2, 3, 4 * WIDTH).view(4, WIDTH).cos()


def step(unit: Computes) -> None:
    unit(rows().requires_grad_()).square().sum().backward()


def runs_of(op: str, function: Callable[[Tensor], Tensor]) -> int:
    """How often an op runs in a step that computes again whatever may be computed again."""
    unit = unit_of(function)
    with apply_policy(unit, [""], FULL), Watch() as watch:
        step(unit)
    assert watch.ops["mm"] > 3, "nothing ran again"
    return int(watch.ops[op])


def normalised_twice(hidden: Tensor) -> Tensor:
    """Scales by statistics that batch norm updates: without a plan, the gradient reads the new ones."""
    seen = torch.ones(WIDTH) * 1
    return F.batch_norm(hidden * seen, seen, seen, training=True)


class DoublesItsInput(torch.autograd.Function):
    """Writes to its argument where PyTorch does not see it, and saves what was written."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        total = hidden.sum(-1, keepdim=True)
        hidden.detach().numpy()[...] *= 2
        ctx.save_for_backward(hidden * 1)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (doubled,) = ctx.saved_tensors
        output: Tensor = gradients[0] * doubled
        return output


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda hidden: in_a_function(hidden.exp(), doubled_by_address),
            r"^a tensor of shape \[4, 8\], saved for backward in the model, was changed in place in forward by the autograd "
            r"Function Written, unknown to autograd, though backward needs what it held\. Write to a copy of it, or let "
            r"PyTorch see the write \(`mutates_args` of a custom op\)\.$",
        ),
        (
            lambda hidden: without_gradients(hidden.sin(), doubled_by_address).cos(),
            r"made or used by sin in the model, .* by something that PyTorch does not see, such as a kernel that was given",
        ),
        (
            normalised_twice,
            r"^a tensor of shape \[8\], saved for backward in the model, .* by native_batch_norm, unknown to",
        ),
    ],
)
def test_what_backward_needs_is_not_overwritten_unseen(function: Callable[[Tensor], Tensor], message: str) -> None:
    """`exp` saves its own result; `sin` has a recipe, which makes something else."""
    unit = unit_of(function)
    with apply_policy(unit, [""], FULL), pytest.raises(MutatedValueError, match=message):
        unit(rows())


def test_a_function_that_writes_unseen_to_what_others_hold_runs_once() -> None:
    table = torch.ones(4, WIDTH)
    unit = unit_of(lambda hidden: hidden.sin() * DoublesItsInput.apply(table))  # type: ignore[no-untyped-call]
    with apply_policy(unit, [""], FULL):
        step(unit)
    assert torch.equal(table, torch.full((4, WIDTH), 2.0))


def test_an_output_may_be_scaled_between_units_and_read_in_another_shape() -> None:
    """As Gemma 3n does with the projection of its embeddings."""

    def scaled(self: Any, hidden: Tensor) -> Any:
        projected = self.project(hidden)
        projected *= 2
        return self.norm(projected)

    parts = {"project": nn.Linear(WIDTH, WIDTH, bias=False), "norm": nn.LayerNorm(WIDTH)}
    model, batch = Computes(scaled, **parts), rows().view(2, 2, WIDTH)
    expected = gradients(model, batch, lambda output: output.square().sum())
    with apply_policy(model, ["project", "norm"], FULL):
        assert_same_gradients(expected, gradients(model, batch, lambda output: output.square().sum()))


@pytest.mark.parametrize(
    ("op", "choose"),
    [
        ("topk", lambda hidden: hidden.topk(3).values),
        ("sort", lambda hidden: hidden.sort(stable=False).values),
        ("max", lambda hidden: hidden.max(-1).values),
        ("kthvalue", lambda hidden: hidden.kthvalue(2).values),
        ("median", lambda hidden: hidden.median(-1).values),
    ],
)
def test_a_choice_is_made_once(op: str, choose: Callable[[Tensor], Tensor]) -> None:
    """Made again, it could come out differently, and gradients would go to what was not chosen."""
    assert runs_of(op, lambda hidden: choose(hidden.sin()).exp()) == 1


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize(
    ("index", "num_runs"),
    [
        (lambda hidden: hidden[:, 0].topk(3).indices, 2),
        (lambda hidden: (slice(None), hidden[0].topk(WIDTH).indices), 2),
        (lambda hidden: hidden > 0, 1),
        (lambda hidden: (hidden > 0).to(torch.uint8), 1),
    ],
    ids=["integers", "second dimension", "mask", "bytes"],
)
def test_gathers_run_again_unless_a_mask_decides_their_shape(index: Callable[[Tensor], Any], num_runs: int) -> None:
    assert runs_of("index", lambda hidden: hidden.sin()[index(hidden)].cos()) == num_runs


def test_what_numpy_writes_to_a_batch_before_backward_is_refused() -> None:
    batch = np.zeros(WIDTH, np.float32)
    unit = unit_of(lambda hidden: (hidden + torch.from_numpy(batch)).sin())
    with apply_policy(unit, [""], FULL):
        loss = unit(rows()).sum()
        batch[:] = 1
        with pytest.raises(MutatedValueError, match=r"\[8\], used by add in .* \(through `\.data` or NumPy\)"):
            loss.backward()


class _WritesInBackward(LayoutSine):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.detach().cos_().mul_(gradient)


def test_what_a_backward_writes_to_is_not_read_by_ops_that_run_again() -> None:
    def function(hidden: Tensor) -> Tensor:
        doubled = hidden * 2
        return (doubled * 3).sin().exp() + _WritesInBackward.apply(doubled)  # type: ignore[no-any-return, no-untyped-call]

    unit = unit_of(function)
    with apply_policy(unit, [""], FULL), pytest.raises(MutatedValueError, match="was changed in place 2 times before"):
        unit(rows()).sum().backward()


@pytest.mark.parametrize(("name", "num_again"), [("slices put together", 2), ("slices filled out of sight", 0)])
def test_a_buffer_is_filled_again_if_all_of_it_was_filled_in_sight(name: str, num_again: int) -> None:
    def num_copies(policy: Policy) -> int:
        model = UNITS[name].model()
        with applied("tape", model, policy), Watch() as watch:
            Run(model).through(plain)
        return int(watch.ops["copy_"])

    assert num_copies(FULL) - num_copies(KEEP_ALL) == num_again


def _long_scan(self: Any, hidden: Tensor) -> Tensor:
    state = self.first(hidden)
    for _ in range(1200):
        state = state * 0.99 + hidden.detach()
    return state.tanh()


@pytest.mark.parametrize(
    ("function", "policy"),
    [
        # Longer than the recursion limit.
        *((_long_scan, policy) for policy in (FULL, NOTHING_KEPT, Random(1))),
        # The layout of a kept value is changed in place.
        (layout_in_place, Only(frozenset({"add"}))),
    ],
)
def test_is_exact(function: Callable[..., Tensor], policy: Policy) -> None:
    case = Case("case", function)
    model = case.model()
    with applied("tape", model, policy):
        assert_same_gradients(Run(case.model()).through(plain, plain), Run(model).through(plain, plain))


@pytest.mark.parametrize(("is_gathered", "gradient"), [(True, 3.0), (False, 0.0)])
def test_a_weight_that_zero_3_has_gathered_is_held_by_its_memory(is_gathered: bool, gradient: float) -> None:
    """Between its uses it is empty; other weights are read in backward with what was assigned to them, as in eager mode."""
    scaled = Computes(lambda self, x: x * self.scale, scale=nn.Parameter(torch.full((4,), 3.0)))
    model, x = nn.Sequential(scaled), torch.ones(4, requires_grad=True)
    if is_gathered:
        scaled.scale.ds_tensor = torch.zeros(2)
    with apply_policy(model, ["0"], FULL):
        output = model(x)
        scaled.scale.data = torch.zeros(4)
        output.sum().backward()
    assert x.grad.tolist() == [gradient] * 4
