"""Models that call `torch.utils.checkpoint` themselves: plans decide in its place, with the same bits, or say why not."""

from collections import Counter
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import recollect
from recollect._torch_private import has_saved_tensors_hooks
from recollect.engine.own_checkpoints import tell_once
from recollect.errors import AlreadyAppliedError, ConfigWarning

NO_EFFECT = "ignore:recollect. torch.utils.checkpoint has no effect"
own = partial(checkpoint, use_reentrant=False)
selective = partial(own, context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]))
Body = Callable[[Any, Tensor], Any]


class Block(nn.Module):
    def __init__(self, calls: Counter[str], wraps: Callable[..., Any] | None) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(32, 128), nn.Linear(128, 32), nn.Dropout(0.1)
        self.calls, self.wraps = calls, wraps

    def part(self, hidden: Tensor, scale: float) -> Any:
        self.calls["part"] += 1
        return self.down(self.drop(nn.functional.gelu(self.up(hidden)))) * scale

    def forward(self, hidden: Tensor, scale: float = 0.5) -> Tensor:
        return hidden + (self.part(hidden, scale) if self.wraps is None else self.wraps(self.part, hidden, scale))


class Net(nn.Module):
    """Its loss is computed in a checkpoint, too, in which no unit runs."""

    def __init__(self, body: Body, wraps: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.layers = nn.ModuleList(Block(self.calls, wraps) for _ in range(4))
        self.head = nn.Linear(32, 64, bias=False)
        self.body = body

    def loss(self, hidden: Tensor, weight: Tensor) -> Tensor:
        self.calls["loss"] += 1
        return (hidden @ weight.T).logsumexp(-1).mean()

    def forward(self, batch: Tensor) -> Any:
        return own(self.loss, self.body(self, self.head(batch)[:, ::2]), self.head.weight)


def each(call: Callable[..., Any], net: Net, hidden: Tensor) -> Any:
    return reduce(lambda value, layer: call(layer, value.sin()) + value, net.layers, hidden)


def under_autocast(net: Net, hidden: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return each(own, net, hidden)


def pair_in_pair(net: Net, hidden: Tensor) -> Any:
    for first, second in zip(net.layers[::2], net.layers[1::2], strict=True):
        hidden = own(lambda value, f=first, s=second: own(lambda v: s(f(v.cos()).exp()).sin(), value).tanh(), hidden)
    return hidden


def plainly(layer: nn.Module, hidden: Tensor) -> Any:
    return layer(hidden)


KINDS: dict[str, tuple[Any, ...]] = {
    "inside": (partial(each, plainly), own),
    "around": (partial(each, partial(own, scale=0.7, preserve_rng_state=True)),),
    "around and inside": (partial(each, own), own),
    "around two, one in the other": (pair_in_pair,),
    "in segments": (lambda net, x: checkpoint_sequential(nn.Sequential(*net.layers), 2, x, use_reentrant=False),),
    "selective": (partial(each, selective),),
    "autocast": (under_autocast,),
}


def attached(model: Net, optimizer: Any, budget: str) -> Any:
    return recollect.attach(model, optimizer, budget, log=lambda _: None)


def applied(model: Net, *_: Any) -> Any:
    with torch.random.fork_rng():
        full = recollect.classic_plan(recollect.record(model, torch.randn(256, 32)), "full").units
    other = recollect.UnitPlan({})
    mixed = {path: other if path in ("layers.0", "layers.2") else unit for path, unit in full.items()}
    return recollect.apply(model, recollect.Plan(mixed))


def steps(kind: tuple[Any, ...], place: Any = None, how: str = "") -> tuple[Any, Counter[str]]:
    """Return the losses and gradients of four steps, and how often what was called in the last one."""
    torch.manual_seed(0)
    model = Net(*kind)
    optimizer, batch = torch.optim.AdamW(model.parameters()), torch.randn(256, 32)
    handle = None if place is None else place(model, optimizer, how)
    found: list[Tensor] = []
    for _ in range(4):
        model.calls.clear()
        loss = model(batch)
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    return found, Counter(model.calls)


@pytest.mark.filterwarnings(NO_EFFECT)
@pytest.mark.parametrize(("place", "how"), [(attached, "100%"), (attached, "90%"), (applied, "")])
@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_decides_with_the_same_bits(kind: str, place: Callable[..., Any], how: str) -> None:
    expected, _ = steps(KINDS[kind])
    found, calls = steps(KINDS[kind], place, how)
    assert all(map(torch.equal, found, expected))
    # Layers never run again; the loss, which no plan reaches, still does.
    assert calls == {"part": 4, "loss": 2}


def test_it_is_said_once_and_ends_with_the_plan() -> None:
    tell_once.cache_clear()
    with pytest.warns(ConfigWarning) as told:
        steps(KINDS["around and inside"], attached, "100%")
    assert [str(warning.message) for warning in told] == [
        "recollect: torch.utils.checkpoint has no effect on layers that recollect plans: the plan decides what they recompute. "
        "Call them without it, and this warning goes away."
    ]
    assert steps(KINDS["around"])[1] == {"part": 8, "loss": 2}


@pytest.mark.filterwarnings(NO_EFFECT)
def test_a_layer_that_fails_in_a_checkpoint_leaves_no_hooks() -> None:
    model = Net(partial(each, own))
    with attached(model, torch.optim.SGD(model.parameters()), "100%"):
        with pytest.raises(TypeError, match="unexpected keyword"):
            own(model, torch.randn(256, 32), scale=0.1)
        assert not has_saved_tensors_hooks()


@pytest.mark.filterwarnings(NO_EFFECT)
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
def test_a_checkpoint_is_compiled_beside_a_plan() -> None:
    """While the compiler traces a checkpoint, it has no hooks."""
    layer, rows = nn.Linear(32, 32), torch.randn(4, 32)
    with applied(Net(partial(each, own))):
        compiled = torch.compile(lambda: own(layer, rows).sin(), backend="aot_eager", fullgraph=True)()
    assert torch.equal(compiled, layer(rows).sin())


def test_functions_that_run_layers_again_are_named() -> None:
    reentrant = partial(each, partial(checkpoint, use_reentrant=True))
    expected, _ = steps((reentrant,))
    tell_once.cache_clear()
    with pytest.warns(ConfigWarning) as told:
        found, _ = steps((reentrant,), attached, "100%")
    assert all(map(torch.equal, found, expected))
    assert [str(warning.message) for warning in told] == [
        "recollect: torch.utils.checkpoint.CheckpointFunction runs layers again in backward, and no plan can change that. To "
        "have recollect decide, call torch.utils.checkpoint with use_reentrant=False, or the layers themselves."
    ]


def with_hooks(layer: nn.Module, hidden: Tensor) -> Any:
    """In the way of DeepSpeed's `non_reentrant_checkpoint`."""

    def unpack(saved: Tensor) -> Tensor:
        with torch.enable_grad():
            layer(hidden)
        return saved

    with saved_tensors_hooks(torch.clone, unpack):
        return layer(hidden)


def test_hooks_that_run_layers_again_are_refused_by_name() -> None:
    message = (
        r"^cannot apply a plan: module 'layers\.3' recomputes already, by hooks of its own on saved tensors; a value would be "
        r"recomputed twice\. To have recollect decide, call it without them\.$"
    )
    tell_once.cache_clear()
    with (
        pytest.raises(AlreadyAppliedError, match=message),
        pytest.warns(ConfigWarning, match="hooks for saved tensors"),
    ):
        steps((partial(each, with_hooks),), attached, "100%")
