"""What surrounds a call of a traced unit: autocast's casts, threads, writes, split backwards, and what holds the model."""

import functools
import gc
import threading
import types
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from blocks import Block, Computes
from engines import num_tape_calls, traced, traced_forwards
from gradients import Step, assert_same_gradients
from policies import FULL
from recollect._torch_dynamo import raised_by_tracing
from recollect._torch_parallel import SPLITS_FUNCTIONS, fake_process_group, split_backward
from recollect.engine.facts import facts_of
from recollect.engine.graph.code_names import names_in
from recollect.engine.graph.real_layouts import laid_out
from recollect.engine.graph.trace import FakeTensorMode
from recollect.engine.placed_forward import Applied
from recollect.errors import ConfigWarning, MutatedValueError
from recollect.measuring.meter import measure_peak

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
PATHS = ("0", "1", "2")
bfloat16 = torch.autocast("cpu", torch.bfloat16)


def model(dropout: float = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(16, dropout) for _ in PATHS))


def plainly(trained: nn.Module) -> Tensor:
    loss: Tensor = trained(X).square().mean()
    loss.backward()
    return loss


def step(trained: nn.Module, run: Callable[[Any], Tensor] = plainly) -> Step:
    trained.zero_grad()
    torch.manual_seed(7)
    loss = run(trained)
    grads = {name: p.grad.clone() for name, p in trained.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def is_equal(run: Callable[[Any], Tensor], new: Callable[[], nn.Module] = model, steps: int = 3) -> Applied:
    """Check that steps are those of a plain model; the first one runs on the tape."""
    plain, planned = new(), new()
    with traced(planned, PATHS, FULL) as handle:
        for _ in range(steps):
            assert_same_gradients(step(plain, run), step(planned, run))
    return handle


def test_a_model_that_fx_has_flattened() -> None:
    """Its code has the ops of modules that are there by name only."""
    plain, planned = (torch.fx.symbolic_trace(model(dropout=0.0)) for _ in range(2))
    with traced(planned, [""], FULL) as handle:
        for _ in range(3):
            assert_same_gradients(step(plain), step(planned))
    assert (num_tape_calls(handle), traced_forwards(handle)[0].why_not) == (1, "")


def _tied() -> nn.Module:
    made = model()
    made[2].up.weight = made[0].up.weight  # type: ignore[union-attr]
    return made


def _with_a_shared_module() -> nn.Module:
    made = model()
    made[2].up = made[0].up
    return made


def _with_a_shared_tensor() -> nn.Module:
    made, shared = model(), torch.ones(16, 16, requires_grad=True)
    for block in made:
        block.up.shared = shared
        block.up.register_forward_pre_hook(lambda up, given: given[0] @ up.shared)
    return made


def _with_a_weight_of_their_model() -> nn.Module:
    made = model().append(nn.Linear(16, 16))
    for block in made[:3]:
        block.up.of_model = [made[3]]
        block.up.register_forward_pre_hook(lambda up, given: given[0] @ up.of_model[0].weight)
    return made


def _under_autocast(trained: Any) -> Tensor:
    with bfloat16:
        loss: Tensor = trained(X).square().mean()
    loss.backward()
    return loss


def _of_a_shared_tensor(trained: Any) -> Tensor:
    trained[0].up.shared.grad = None
    return torch.stack([_under_autocast(trained), trained[0].up.shared.grad.sum()])


def _two_under_one_autocast(trained: Any) -> Tensor:
    with bfloat16:
        loss = (trained(X) + trained(2 * X)).square().mean()
    loss.backward()
    return loss


def _of_a_leaf(trained: Any) -> Tensor:
    leaf = X.clone().requires_grad_()
    with bfloat16:
        loss = (trained[0](leaf) + trained[0].up(leaf)[:, :16]).square().mean()
    loss.backward()
    assert leaf.grad is not None
    return torch.stack([loss, leaf.grad.sum()])


@pytest.mark.parametrize(
    ("run", "new", "why_not"),
    [
        (_under_autocast, model, ""),
        (_under_autocast, _tied, "autocast keeps the cast of a parameter that other modules have, too"),
        (_under_autocast, _with_a_shared_module, "autocast keeps the cast of a parameter that other modules have, too"),
        (
            _of_a_shared_tensor,
            _with_a_shared_tensor,
            "it reads tensors that need gradients besides its parameters; autocast keeps their casts",
        ),
        (
            _under_autocast,
            _with_a_weight_of_their_model,
            "it reads tensors that need gradients besides its parameters; autocast keeps their casts",
        ),
        (
            _two_under_one_autocast,
            model,
            "it is called several times under one autocast, which keeps the casts of its parameters",
        ),
        (_of_a_leaf, model, "autocast keeps the cast of its input for all that read it"),
    ],
)
def test_casts_that_autocast_shares(run: Callable[[Any], Tensor], new: Callable[[], nn.Module], why_not: str) -> None:
    """Otherwise gradients would be added up in another precision."""
    with pytest.warns(ConfigWarning, match=why_not) if why_not else nullcontext():
        handle = is_equal(run, new)
    assert traced_forwards(handle)[0].why_not == why_not


def test_a_traced_layer_that_is_called_twice_under_one_autocast_later() -> None:
    """The first such step adds up in 32 bits: by the second call, the first one has made its own casts."""
    plain, planned = model(), model()
    with traced(planned, PATHS, FULL):
        for run in (_under_autocast, _under_autocast):
            assert_same_gradients(step(plain, run), step(planned, run))
        with pytest.warns(ConfigWarning, match="called several times under one autocast"):
            step(planned, _two_under_one_autocast)
        assert_same_gradients(step(plain, _two_under_one_autocast), step(planned, _two_under_one_autocast))


def _closure(forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapper


def _method(forward: Any) -> Callable[..., Any]:
    return types.MethodType(lambda self, *args, **kwargs: forward(*args, **kwargs), forward.__self__)


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("wrap", [_closure, lambda forward: _closure(_closure(forward)), functools.partial, _method])
def test_modules_that_were_given_a_forward(wrap: Callable[..., Any], is_inside: bool) -> None:
    """Dynamo names what runs in them by the way that leads through the wrapper, as around torchtitan's layers."""

    def wrapped() -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(*(nn.Sequential(Block(16, 0.1)) for _ in PATHS))
        for unit in made:
            module: Any = unit[0] if is_inside else unit  # type: ignore[index]
            module.forward = wrap(module.forward)
        return made

    assert [one.why_not for one in traced_forwards(is_equal(plainly, wrapped))] == [""] * len(PATHS)


def test_code_that_belongs_to_no_module() -> None:
    names: dict[str, Any] = {}
    exec("def doubled(x): return scale(2 * x)", names)
    assert names["doubled"].__module__ is None
    assert names_in(names["doubled"]) == {"scale"}


def test_threads_that_trace_at_the_same_time() -> None:
    """Of models without dropout that are there before: threads share a generator."""
    found: list[Applied] = []
    models = [model(0.0) for _ in range(4)]
    threads = [threading.Thread(target=lambda: found.append(is_equal(plainly, models.pop))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [forward.why_not for handle in found for forward in traced_forwards(handle)] == [""] * 6


@pytest.mark.filterwarnings("ignore:recollect.*run on the tape, exactly")
def test_gradients_of_inputs_first_and_of_parameters_one_by_one() -> None:
    """As stages of pipelines do that split backward; with gradients that are there, a unit is a chain of nodes."""

    def halves(trained: nn.Module) -> Tensor:
        for parameter in trained.parameters():
            parameter.grad = torch.zeros_like(parameter)
        x = X.clone().requires_grad_()
        with fake_process_group(0, 1):
            stage = PipelineStage(trained, 0, 1, torch.device("cpu"))
            loss: Tensor = stage.forward_maybe_with_nosync(x).square().mean()
        split_backward(loss, [x], trained)
        assert x.grad is not None
        return torch.stack([loss, x.grad.sum()])

    handle = is_equal(halves)
    lost = "a stage of a pipeline may split its backward, which takes traces from torch 2.13 on only"
    assert [forward.why_not for forward in traced_forwards(handle)] == ["" if SPLITS_FUNCTIONS else lost] * 3
    assert num_tape_calls(handle) == len(PATHS) * (1 if SPLITS_FUNCTIONS else 3)


def test_a_backward_that_ends_within_a_layer_leaves_nothing_that_it_computed_again() -> None:
    """As that of one weight does, which keeps the graph for the others, where gradients are there to add to."""
    planned, x = model(), X.repeat(512, 1)
    with traced(planned, PATHS, FULL) as handle:
        for _ in range(2):
            planned(x).sum().backward()
        loss = planned(x).sum()
        found = measure_peak(lambda: torch.autograd.grad(loss, planned[2].down.weight, retain_graph=True), device="cpu")
        assert num_tape_calls(handle) == len(PATHS)
        assert found.end_bytes - found.start_bytes < x.nbytes


def test_a_step_that_looks_for_anomalies_runs_on_the_tape() -> None:
    def anomalous(trained: nn.Module) -> Tensor:
        with torch.autograd.set_detect_anomaly(True):
            return plainly(trained)

    handle = is_equal(anomalous)
    assert num_tape_calls(handle) == 3 * len(PATHS)
    assert [forward.why_not for forward in traced_forwards(handle)] == [""] * 3


class _EndsInView(nn.Sequential):
    """Its last op is a view: of a product with a bias, or of what backward reads."""

    def __init__(self, is_read: bool = False) -> None:
        torch.manual_seed(0)
        last = nn.ReLU() if is_read else nn.Identity()
        super().__init__(nn.Flatten(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), last, nn.Unflatten(1, (2, 8)))


@pytest.mark.parametrize("part", [slice(None), slice(2)], ids=["all of it", "a part of it"])
def test_an_output_that_is_a_view_can_be_written_to(part: slice) -> None:
    def run(trained: Any) -> Tensor:
        hidden = X.view(8, 2, 8)
        for layer in trained:
            made = layer(hidden)
            made[..., part] += hidden[..., part]
            hidden = made
        loss = hidden.square().mean()
        loss.backward()
        return loss

    handle = is_equal(run, lambda: nn.Sequential(*(_EndsInView() for _ in PATHS)))
    assert num_tape_calls(handle) == len(PATHS)


def test_a_write_to_an_output_that_is_a_view_of_what_backward_reads() -> None:
    trained = nn.Sequential(*(_EndsInView(is_read=True) for _ in PATHS))
    with traced(trained, PATHS, FULL):
        step(trained)
        made = trained(X)
        made += 1
        with pytest.raises(MutatedValueError, match="saved for backward in 2, was changed in place 1 time"):
            made.sum().backward()


def test_a_write_to_an_output_that_is_a_view_of_what_other_ops_read_is_refused() -> None:
    """In eager mode its gradient would be added up first, and from a trace in a different order."""
    trained = nn.Sequential(Computes(lambda self, x: ((y := self.linear(x))[:, :], y.exp()), linear=nn.Linear(16, 16)))
    with traced(trained, ["0"], FULL):
        trained(X)
        trained(X)[0].clone().add_(1)
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            trained(X)[0].add_(1)


def test_a_write_that_raises_no_version() -> None:
    planned = model()
    with traced(planned, PATHS, FULL):
        for _ in range(2):
            plainly(planned)
        hidden = planned[0](X)
        output = planned[1](hidden)
        hidden.data.add_(1)
        with pytest.raises(MutatedValueError, match="shape \\[8, 16\\], saved for backward in 1, was changed in place"):
            output.sum().backward()


def test_a_traced_model_is_let_go_of() -> None:
    planned = model()
    handle = traced(planned, PATHS, FULL)
    for _ in range(2):
        plainly(planned)
    assert num_tape_calls(handle) == len(PATHS)
    reference = weakref.ref(planned[0].up.weight)
    del planned, handle
    gc.collect()
    assert reference() is None


class Showing(nn.Module):
    """Shows what it has computed in an attribute, as attention does with its weights."""

    def __init__(self, can_be_traced: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.can_be_traced = can_be_traced
        self.shown = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        self.shown = self.linear(x).tanh()
        if not self.can_be_traced:
            self.shown.retain_grad()
        return x + self.shown * 2


@pytest.mark.filterwarnings("ignore:recollect.*run on the tape, exactly")
@pytest.mark.parametrize("can_be_traced", [True, False])
def test_tracing_holds_no_attributes(can_be_traced: bool) -> None:
    """What Dynamo leaves in reference cycles may live until the collector's next look at all objects."""
    planned = nn.Sequential(*(Showing(can_be_traced) for _ in PATHS))
    shown = []
    gc.collect()
    gc.disable()
    try:
        with traced(planned, PATHS, FULL) as handle:
            for _ in range(3):
                shown += [weakref.ref(layer.shown) for layer in planned]
                plainly(planned)
            assert num_tape_calls(handle) == len(PATHS) * (1 if can_be_traced else 3)
        assert [reference() for reference in shown] == [None] * len(shown)
    finally:
        gc.enable()


class Acting(Showing):
    """Computes with an activation that it may share."""

    def __init__(self, can_be_traced: bool, act: nn.Module) -> None:
        super().__init__(can_be_traced)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


@pytest.mark.filterwarnings("ignore:recollect.*run on the tape, exactly")
def test_layers_are_traced_that_share_a_module_with_one_on_the_tape() -> None:
    act = nn.SiLU()
    planned = nn.Sequential(*(Acting(can_be_traced, act) for can_be_traced in (False, True, True)))
    with traced(planned, PATHS, FULL) as handle:
        for _ in range(3):
            plainly(planned)
        assert [bool(forward.why_not) for forward in traced_forwards(handle)] == [True, False, False]


# Tracing: its errors, and traced results, which have the layouts of the real ones


def test_an_error_of_the_layer_is_no_error_of_tracing() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    assert not raised_by_tracing(caught.value)


ACROSS = (2, 3, 8), (3 * 8, 1, 3)
ONE_IMAGE = (1, 6, 2, 2), (24, 1, 12, 6)


@pytest.mark.parametrize(
    ("func", "layouts", "more"),
    [
        (torch.ops.aten.softplus_backward.default, [ACROSS, ((2, 3, 8), (3 * 8, 8, 1))], (1.0, 20.0)),
        (torch.ops.aten.view.default, [ONE_IMAGE], ((1, 6, 4),)),
    ],
)
def test_traced_results_are_laid_out_as_kernels_do(func: Any, layouts: Any, more: Any) -> None:
    real = func(*(torch.empty_strided(*layout) for layout in layouts), *more)
    with FakeTensorMode():
        args = (*(torch.empty_strided(*layout) for layout in layouts), *more)
        fake = func(*args)
        assert fake.stride() != real.stride(), "PyTorch has changed: find other arguments"
        found = laid_out(func, facts_of(func), args, {}, fake)
    assert found.stride() == real.stride()


def test_layouts_element_by_element_take_little_memory() -> None:
    """As of TabM's gradients, which come from batched products: they are as large as the batch."""
    layout = (64, 128, 256), (256, 16384, 1)  # 8 MiB

    def lay_out() -> None:
        with FakeTensorMode():
            args = torch.empty_strided(*layout), torch.empty(layout[0])
            found = laid_out(torch.ops.aten.mul.Tensor, facts_of(torch.ops.aten.mul.Tensor), args, {}, args[1])
        assert found.stride() == layout[1]

    assert measure_peak(lay_out, device="cpu").peak_growth_bytes < 512 << 10


def test_traced_results_have_the_types_that_kernels_give_them() -> None:
    """Statistics of a norm in 16 bits are in 32, as its weights, on a CPU under autocast."""
    func = torch.ops.aten.native_group_norm.default

    def made() -> tuple[Any, ...]:
        return torch.ones(2, 4, 8, dtype=torch.bfloat16), torch.ones(4), torch.ones(4), 2, 4, 8, 2, 1e-5

    real = [result.dtype for result in func(*made())]
    with FakeTensorMode():
        args = made()
        fake = func(*args)
        assert [result.dtype for result in fake] != real, "PyTorch has changed: find other arguments"
        assert [result.dtype for result in laid_out(func, facts_of(func), args, {}, fake)] == real
