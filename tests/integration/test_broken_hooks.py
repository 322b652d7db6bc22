"""Each of PyTorch's hooks broken on purpose: gradients stay those of the plain model, or there is an error; and one warning."""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from blocks import Computes, mean_square
from gradients import assert_same_gradients
from recollect.engine import self_check
from recollect.engine.self_check import SwitchedOff, switched_off
from recollect.errors import TorchVersionWarning, UnsupportedModelError

PRIVATE = "recollect._torch_private"


class Stored(Function):
    """Writes to what it is given, out of sight, and says nothing of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.detach().numpy()[...] += 1
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x


def unit(*, stores: bool) -> Computes:
    """[n, 16] -> [n, 16], by all that the tape has rules for: draws, writes in place, views, autocast, a small inner module."""

    def run(self: Any, hidden: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.linear(hidden).float()
        x = self.act(x).sin()
        x = x.mul_(hidden.sigmoid()).view(-1, 2, 8).transpose(1, 2).reshape(-1, 16)
        x = self.mix(x) + torch.rand_like(x)
        if stores:
            x = Stored.apply(x.tanh() + x)
        return x.cos() * hidden

    act = nn.Sequential(nn.GELU(), nn.Dropout(0.5))
    return Computes(run, linear=nn.Linear(16, 16), mix=nn.Linear(16, 16), act=act)


ROWS = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def built(*, stores: bool) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(unit(stores=stores), unit(stores=stores))


class Halved(TorchDispatchMode):
    """The user's own mode: all sines are half of what they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output / 2 if func is torch.ops.aten.sin.default else output


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of five steps: three plain ones, since modules are watched less after two, and then with all that may be around them."""
    torch.manual_seed(2)
    for _ in range(3):
        mean_square(model(ROWS)).backward()
    with Halved():
        loss = mean_square(model(ROWS))
    loss.backward()
    loss = mean_square(model(ROWS))
    loss.backward(retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def tangent(model: nn.Module) -> Tensor:
    torch.manual_seed(2)
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(mean_square(model(forward_ad.make_dual(ROWS, ROWS.cos())))).tangent


@functools.cache
def full_recompute(*, stores: bool) -> recollect.Plan:
    """A plan as somebody may write it by hand, who names all that there is; made while all holds."""
    profile = recollect.record(built(stores=stores), ROWS, units=["0", "1"], loss_fn=mean_square)
    return recollect.Plan(
        {
            call.path: recollect.UnitPlan(
                {v.name: "recompute" for v in profile.graphs[call.graph].values if v.producer is not None}
            )
            for call in profile.calls
            if call.path
        }
    )


@pytest.fixture(autouse=True)
def checked_anew() -> Iterator[None]:
    switched_off.cache_clear()
    yield
    switched_off.cache_clear()


def broken(monkeypatch: pytest.MonkeyPatch, name: str, replacement: Any, home: str = PRIVATE) -> None:
    """Replace a name of PyTorch's in all of recollect's modules that have imported it."""
    original = getattr(sys.modules[home], name)
    for module in [module for path, module in sys.modules.items() if path.startswith("recollect")]:
        if vars(module).get(name) is original:
            monkeypatch.setattr(module, name, replacement)


def nothing(*args: Any, **kwargs: Any) -> Any:
    return nullcontext()


def missing(*args: Any, **kwargs: Any) -> Any:
    raise AttributeError("module 'torch._C' has no such attribute")


def private_counter(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def forgetful(storage: object, record: object) -> None:
    """As if a storage were another object each time."""


def no_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch modes are entered, and see nothing."""
    monkeypatch.setattr(self_check._Seen, "__torch_dispatch__", lambda self, func, types, args=(), kwargs=None: None)


def unpacked_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks of saved tensors are entered, and not called."""
    broken(monkeypatch, "saved_tensors_hooks", nothing, "recollect.engine.self_check")
    monkeypatch.setattr("recollect.engine.tape.CheckpointHooks", nothing)


def by_name(name: str, replacement: Any, home: str = PRIVATE) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: broken(monkeypatch, name, replacement, home)


FUNCTIONS = "recollect._torch_functions"
VALUES = "recollect.engine.values"
# What is broken, by which hooks that is noticed, and what is switched off.
BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], set[SwitchedOff]]] = {
    "Functions are not seen": (by_name("watched_functions", nothing, FUNCTIONS), {SwitchedOff.FUNCTIONS}),
    "Functions cannot be asked for": (by_name("watched_functions", missing, FUNCTIONS), {SwitchedOff.FUNCTIONS}),
    "hooks are not called": (
        unpacked_early,
        {SwitchedOff.PLANS, SwitchedOff.STEPPING_ASIDE, SwitchedOff.SECOND_BACKWARD},
    ),
    "hooks do not step aside": (by_name("pop_saved_tensors_hooks", lambda owner: None), {SwitchedOff.STEPPING_ASIDE}),
    "hooks do not come back": (by_name("push_saved_tensors_hooks", nothing), {SwitchedOff.STEPPING_ASIDE}),
    "modes see nothing": (no_dispatch, {SwitchedOff.PLANS, SwitchedOff.STEPPING_ASIDE}),
    "modes do not step aside": (by_name("pop_dispatch_mode", lambda mode: True), {SwitchedOff.STEPPING_ASIDE}),
    "modes do not come back": (by_name("push_dispatch_mode", nothing), {SwitchedOff.STEPPING_ASIDE, SwitchedOff.PLANS}),
    "modes are not exchanged": (by_name("replaced_dispatch_modes", nothing), {SwitchedOff.PLANS}),
    "modes are not switched off": (by_name("disable_torch_dispatch", nothing), {SwitchedOff.PLANS}),
    "storages are new objects": (by_name("attach_record", forgetful, VALUES), {SwitchedOff.PLANS}),
    "aliases in hooks have counters of their own": (
        by_name("alias_in_hook", private_counter, VALUES),
        {SwitchedOff.PLANS},
    ),
    "aliases in modes have counters of their own": (by_name("share_version_counters", nothing), {SwitchedOff.PLANS}),
    "ops run again through autograd": (by_name("below_autograd", nothing), {SwitchedOff.PLANS}),
    "ops run again through autocast": (by_name("disable_autocast", nothing), {SwitchedOff.PLANS}),
    "Functions run again past autograd": (by_name("above_autograd", nothing, FUNCTIONS), {SwitchedOff.PLANS}),
    "draws differ": (
        by_name("first_run", lambda facts, func, args, kwargs: (func(*args), None), "recollect.engine.draws"),
        {SwitchedOff.RANDOM_OPS},
    ),
    "transforms do not show": (by_name("transforms_are_active", lambda: False), {SwitchedOff.PLANS}),
    "kept graphs do not show": (by_name("keeps_graph", lambda: False), {SwitchedOff.SECOND_BACKWARD}),
    "all graphs seem kept": (by_name("keeps_graph", lambda: True), {SwitchedOff.SECOND_BACKWARD}),
    "backwards have one number": (by_name("current_backward", lambda: 1), {SwitchedOff.SECOND_BACKWARD}),
    "ends of backwards are not told": (
        by_name("at_end_of_backward", lambda callback: None),
        {SwitchedOff.SECOND_BACKWARD},
    ),
}


@pytest.mark.parametrize("stores", [False, True], ids=["ops", "function"])
@pytest.mark.parametrize("name", BROKEN)
def test_gradients_stay_exact_without_a_hook(monkeypatch: pytest.MonkeyPatch, name: str, stores: bool) -> None:
    expected, plan = gradients(built(stores=stores)), full_recompute(stores=stores)
    switched_off.cache_clear()
    break_hook, lost = BROKEN[name]
    break_hook(monkeypatch)
    model = built(stores=stores)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with recollect.apply(model, plan):
            try:
                found = gradients(model)
            except (UnsupportedModelError, RuntimeError):
                found = None
    assert switched_off() == lost
    messages = [str(w.message) for w in caught if w.category is TorchVersionWarning]
    assert len(messages) == 1 and torch.__version__.partition("+")[0] in messages[0]
    assert all(one.value in messages[0] for one in lost)
    if found is None:
        assert lost & {SwitchedOff.FUNCTIONS, SwitchedOff.SECOND_BACKWARD}
    else:
        assert_same_gradients(found, expected)


# PyTorch's own decompositions for forward mode are scripted when they are first used.
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_tangents_stay_exact_where_transforms_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, plan = tangent(built(stores=False)), full_recompute(stores=False)
    switched_off.cache_clear()
    BROKEN["transforms do not show"][0](monkeypatch)
    model = built(stores=False)
    with pytest.warns(TorchVersionWarning), recollect.apply(model, plan):
        assert torch.equal(tangent(model), expected)
