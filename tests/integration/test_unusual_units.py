"""Units that do what few layers do: each is exact, or keeps what it must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradients import Step, assert_same_gradients, clear, collect, gradients
from library_ops import double_
from policies import FULL, KEEP_ALL, NOTHING_KEPT, Only, Policy, Random
from recollect.applying import apply_policy
from watch import Watch

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated"),
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),
]

WIDTH = 8
PLANS: dict[str, Policy] = {"keep-all": KEEP_ALL, "full": FULL, "nothing-kept": NOTHING_KEPT, "random-1": Random(1)}
every_plan = pytest.mark.parametrize("policy", PLANS.values(), ids=PLANS)


class Unit(nn.Module):
    """A function of (unit, hidden) with whatever modules it needs. [4, 8] -> [4, 8]."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.counter = 0
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(self, hidden @ self.weight)


class TwoUnits(nn.Module):
    """A stem, the unit twice with weights of its own, and a sum. [4, 8] -> scalar."""

    def __init__(self, make: Callable[[], Unit]) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList([make(), make()])

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.stem(hidden)
        for unit in self.units:
            hidden = unit(hidden).sin()
        return hidden.square().sum()


def built(make: Callable[[], Unit]) -> tuple[TwoUnits, Tensor]:
    torch.manual_seed(0)
    return TwoUnits(make).train(), torch.randn(4, WIDTH)


def check(make: Callable[[], Unit], policy: Policy, step: Callable[[TwoUnits, Tensor], Step] = gradients) -> None:
    model, data = built(make)
    expected = step(model, data)
    model, data = built(make)
    with apply_policy(model, ["units.0", "units.1"], policy):
        assert_same_gradients(expected, step(model, data))


def force_field(unit: Unit, hidden: Tensor) -> Tensor:
    position = hidden.detach().requires_grad_()
    energy = (position @ unit.weight).tanh().square().sum()
    (force,) = torch.autograd.grad(energy, position, create_graph=True)
    return hidden + force


def own_generator(unit: Unit, hidden: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(unit.counter)
    unit.counter += 1
    return hidden * torch.rand(hidden.shape, generator=generator).exp()


def reseeds(unit: Unit, hidden: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        hidden = F.dropout(hidden.sin(), 0.5)
    return F.dropout(hidden.cos(), 0.5)


def inner_checkpoint(unit: Unit, hidden: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return F.dropout((x @ unit.weight).sigmoid(), 0.2)

    result: Tensor = checkpoint(inner, hidden.sin(), use_reentrant=False)
    return result.cos()


def inner_save_on_cpu(unit: Unit, hidden: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        hidden = (hidden.sin() @ unit.weight).sigmoid()
    return hidden.cos() * hidden


def inner_autocast(unit: Unit, hidden: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = (hidden.sin() @ unit.weight).relu()
    return (hidden @ unit.weight.bfloat16()).float().exp().cos()


def inference_constant(unit: Unit, hidden: Tensor) -> Tensor:
    """A table made under inference mode: such tensors have no version counter."""
    with torch.inference_mode():
        table = torch.arange(WIDTH).cos()
    return (hidden + table).sin()


def long_scan(unit: Unit, hidden: Tensor) -> Tensor:
    """Longer than Python's recursion limit."""
    state = hidden
    for _ in range(1200):
        state = state * 0.99 + hidden.detach()
    return state.tanh()


def counts_in_python(unit: Unit, hidden: Tensor) -> Tensor:
    unit.counter += 1
    return (hidden * unit.counter).sin()


def writes_like_a_kernel(unit: Unit, hidden: Tensor) -> Tensor:
    return KernelSine.apply(hidden).square()


class KernelSine(torch.autograd.Function):
    """Fills a buffer behind PyTorch's back, as a Triton kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        output = torch.empty_like(x)
        output.numpy()[...] = x.detach().sin().numpy()
        ctx.save_for_backward(x, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, output = ctx.saved_tensors
        return gradient * x.cos() + 0 * output


def marks_dirty(unit: Unit, hidden: Tensor) -> Tensor:
    return InPlaceDouble.apply(hidden.sin()).square()


class InPlaceDouble(torch.autograd.Function):
    """Writes into its argument behind PyTorch's back, and says so to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        values = x.detach().numpy()
        values *= 2
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (doubled,) = ctx.saved_tensors
        return gradient * 2 + 0 * doubled


def complex_numbers(unit: Unit, hidden: Tensor) -> Tensor:
    """Rotary embedding as complex multiplication, the way Llama's first code did it."""
    turned = torch.view_as_complex(hidden.reshape(4, -1, 2)) * torch.polar(torch.ones(4), torch.arange(4.0))
    return torch.view_as_real(turned).flatten(1).cos()


def conjugate(unit: Unit, hidden: Tensor) -> Tensor:
    """A conjugate has the same storage, layout and version as the original, and other numbers."""
    number = torch.view_as_complex(hidden.reshape(4, -1, 2)) * 2
    return torch.view_as_real(number.conj().exp() + number * number.conj()).flatten(1)


def negative_view(unit: Unit, hidden: Tensor) -> Tensor:
    doubled = hidden * 2
    return torch._neg_view(doubled).exp() * doubled.sin()


def layout_in_place(unit: Unit, hidden: Tensor) -> Tensor:
    """`transpose_` and its kin bump the version counter, though no number changes."""
    doubled = hidden * 2
    above = doubled + 1
    doubled.transpose_(0, -1).unsqueeze_(0).squeeze_(0).t_()
    return above.sin() * doubled


def fourier(unit: Unit, hidden: Tensor) -> Tensor:
    return (torch.fft.rfft(hidden).abs() @ unit.weight[: WIDTH // 2 + 1]).sin()


def other_dtype_view(unit: Unit, hidden: Tensor) -> Tensor:
    bits = hidden.detach().view(torch.int32) & 1
    return (hidden * bits.float()).exp()


def moves_data(unit: Unit, hidden: Tensor) -> Tensor:
    """Assigns to `.data`, which is older than `no_grad` and still in use."""
    scaled = hidden * 2
    scaled.data = scaled.data.clamp(-1, 1)
    return scaled.exp()


def writes_to_data(unit: Unit, hidden: Tensor) -> Tensor:
    scaled = hidden * 2
    scaled.data.clamp_(-1, 1)
    return scaled.exp()


def fills_by_parts(unit: Unit, hidden: Tensor) -> Tensor:
    """A static cache: rows are written into a buffer at places that depend on the data."""
    cache = torch.zeros(6, WIDTH)
    cache.index_copy_(0, hidden[:, 0].argsort(), hidden)
    cache.scatter_add_(0, torch.ones(1, WIDTH, dtype=torch.long), hidden[:1].sin())
    return cache[:4].exp() + cache[2:]


def puts_slices_together(unit: Unit, hidden: Tensor) -> Tensor:
    """As Hugging Face's DeepSeek-V3 makes keys of a rotated part and another one."""
    keys = hidden.new_empty(4, 2, WIDTH // 2)
    keys[..., :3] = hidden.view(4, 2, -1)[..., :3].sin()
    keys[..., 3:] = hidden.view(4, 2, -1)[..., :1].exp()
    return (keys.square() * keys.tanh()).flatten(1)


def fills_slices_out_of_sight(unit: Unit, hidden: Tensor) -> Tensor:
    """Half of a buffer, and some of it twice; what is left is filled as a foreign kernel fills it."""
    keys = torch.empty_like(hidden)
    keys[:, :2] = hidden[:, :2].sin()
    keys[:, 1:3] = hidden[:, 1:3].exp()
    keys[:, 4:] = hidden[:, 4:].cos()
    keys.detach().numpy()[:, 3] = 2
    return keys.square()


def fills_nothing(unit: Unit, hidden: Tensor) -> Tensor:
    """A buffer without elements, whose strides say nothing."""
    nothing = torch.empty_strided((0, 2), (0, 0)).fill_(1)
    return hidden * (1 + nothing.sum())


def resizes(unit: Unit, hidden: Tensor) -> Tensor:
    buffer = torch.empty(0)
    with torch.no_grad():
        torch.mm(hidden, unit.weight, out=buffer)
        buffer += 1
    return hidden * buffer.sigmoid()


def functions_of_functions(unit: Unit, hidden: Tensor) -> Tensor:
    jacobian = torch.func.vmap(torch.func.jacrev(torch.tanh))(hidden)
    slope = torch.func.linearize(torch.tanh, hidden)[1](hidden)
    return (jacobian @ hidden.unsqueeze(-1)).squeeze(-1).sin() + slope


def foreach(unit: Unit, hidden: Tensor) -> Tensor:
    rows = [row.clone() for row in hidden]
    rows = list(torch._foreach_mul(rows, 2.0))
    torch._foreach_add_(rows, [row.detach() for row in rows])
    return torch.stack(rows).sin()


def custom_op_in_place(unit: Unit, hidden: Tensor) -> Tensor:
    """Ops of `torch.library.custom_op` raise the version of what they write to before dispatch modes see them."""
    factor = (hidden @ unit.weight).detach().sin()
    before = factor.exp()
    double_(factor)
    return hidden * factor.cos() * before


def custom_op_on_kept(unit: Unit, hidden: Tensor) -> Tensor:
    factor = torch.ones(WIDTH)
    before = factor.exp()
    double_(factor)
    half = factor[:2]
    double_(half)
    return hidden * (factor * hidden).sin() * before


def one_element(unit: Unit, hidden: Tensor) -> Tensor:
    return hidden * (1 + (hidden.detach().abs().max().item()))


def partly_without_gradient(unit: Unit, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        scale = hidden.sin().exp()
    return hidden * scale


FUNCTIONS = (
    force_field,
    own_generator,
    reseeds,
    inner_checkpoint,
    inner_save_on_cpu,
    inner_autocast,
    inference_constant,
    long_scan,
    counts_in_python,
    writes_like_a_kernel,
    marks_dirty,
    complex_numbers,
    conjugate,
    negative_view,
    layout_in_place,
    fourier,
    other_dtype_view,
    moves_data,
    writes_to_data,
    fills_by_parts,
    puts_slices_together,
    fills_slices_out_of_sight,
    fills_nothing,
    resizes,
    foreach,
    custom_op_in_place,
    custom_op_on_kept,
    one_element,
    partly_without_gradient,
    functions_of_functions,
)


@every_plan
@pytest.mark.filterwarnings("ignore:recollect. torch.utils.checkpoint has no effect", "ignore:Attempted to insert")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_function(function: Callable[[Unit, Tensor], Tensor], policy: Policy) -> None:
    check(lambda: Unit(function), policy)


@pytest.mark.parametrize(("function", "num_again"), [(puts_slices_together, 4), (fills_slices_out_of_sight, 0)])
def test_a_buffer_is_filled_again_if_all_of_it_was_filled_in_sight(
    function: Callable[[Unit, Tensor], Tensor], num_again: int
) -> None:
    copies = []
    for policy in (KEEP_ALL, FULL):
        model, data = built(lambda: Unit(function))
        with apply_policy(model, ["units.0", "units.1"], policy), Watch() as watch:
            gradients(model, data)
        copies.append(watch.ops["copy_"])
    assert copies[1] - copies[0] == num_again


def test_layout_of_a_kept_value_is_changed_in_place() -> None:
    check(lambda: Unit(layout_in_place), Only(frozenset({"add"})))


def _recurrent(unit: Any, hidden: Tensor) -> Tensor:
    output, _ = unit.inner(hidden.unsqueeze(0))
    result: Tensor = output.squeeze(0)
    return result


def _images(unit: Any, hidden: Tensor) -> Tensor:
    result: Tensor = unit.inner(hidden.reshape(2, 4, 2, 2)).reshape(4, -1)
    return result


def _pooled(unit: Any, hidden: Tensor) -> Tensor:
    small, where = F.max_pool2d(hidden.reshape(1, 1, 4, 8), 2, return_indices=True)
    return F.max_unpool2d(small.sin(), where, 2).reshape(4, 8).exp()


def _looked_up(unit: Any, hidden: Tensor) -> Tensor:
    found = unit.inner((hidden.detach()[:, :3].abs() * 3).long().clamp(max=9))
    result: Tensor = found if found.ndim == 2 else found.mean(1)
    return hidden + result


def _inner(unit: Any, hidden: Tensor) -> Tensor:
    result: Tensor = unit.inner(hidden)
    return result


def _attended(unit: Any, hidden: Tensor) -> Tensor:
    output, weights = unit.inner(hidden, hidden, hidden, need_weights=True)
    result: Tensor = output * weights.mean()
    return result


def _spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


MODULES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], nn.Module]]] = {
    "lstm": (_recurrent, lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3)),
    "gru": (_recurrent, lambda: nn.GRU(WIDTH, WIDTH)),
    "attention with weights": (_attended, lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.2)),
    "spectral norm": (_inner, _spectral),
    "weight norm": (_inner, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "batch norm 1d": (_inner, lambda: nn.BatchNorm1d(WIDTH, momentum=None)),
    "batch norm 2d": (_images, lambda: nn.BatchNorm2d(4)),
    "batch norm without statistics": (_images, lambda: nn.BatchNorm2d(4, track_running_stats=False)),
    "frozen batch norm": (_images, lambda: nn.BatchNorm2d(4).requires_grad_(False)),
    "instance norm": (_images, lambda: nn.InstanceNorm2d(4, track_running_stats=True)),
    "group norm": (_images, lambda: nn.GroupNorm(2, 4)),
    "channel dropout": (_images, lambda: nn.Dropout2d(0.4)),
    "alpha dropout": (_inner, lambda: nn.AlphaDropout(0.4)),
    "random relu": (_inner, nn.RReLU),
    "random relu in place": (_inner, lambda: nn.RReLU(inplace=True)),
    "transposed convolution": (_images, lambda: nn.ConvTranspose2d(4, 4, 1)),
    "max pool and unpool": (_pooled, nn.Identity),
    "embedding with a maximum norm": (_looked_up, lambda: nn.Embedding(10, WIDTH, max_norm=0.5)),
    "embedding bag": (_looked_up, lambda: nn.EmbeddingBag(10, WIDTH, mode="max")),
    "bilinear": (lambda unit, x: unit.inner(x, x.sin()), lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH)),
    "gumbel softmax": (lambda unit, x: F.gumbel_softmax(x, hard=True) * x, nn.Identity),
    "compiled": (_inner, lambda: torch.compile(nn.Linear(WIDTH, WIDTH), backend="aot_eager")),
    "traced": (
        _inner,
        lambda: torch.jit.trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), torch.ones(4, WIDTH)),
    ),
}


@every_plan
@pytest.mark.parametrize(("function", "make_inner"), MODULES.values(), ids=MODULES)
def test_module(function: Any, make_inner: Callable[[], nn.Module], policy: Policy) -> None:
    check(lambda: Unit(function, inner=make_inner()), policy)


@every_plan
@pytest.mark.parametrize("name", ["spectral norm", "batch norm 1d", "embedding with a maximum norm"])
def test_state_that_the_next_forward_writes(name: str, policy: Policy) -> None:
    """Two forwards before the first backward: the second writes to buffers or weights that the first has read."""

    def two_forwards(model: TwoUnits, data: Tensor) -> Step:
        clear(model, data)
        losses = [model(data), model(2 * data)]
        for loss in losses:
            loss.backward()
        return collect(model, data, losses[0])

    function, make_inner = MODULES[name]
    make: Callable[[], Unit] = lambda: Unit(function, inner=make_inner())  # noqa: E731
    model, data = built(make)
    try:
        two_forwards(model, data)
    except RuntimeError:
        pytest.skip("plain autograd refuses it")
    check(make, policy, two_forwards)


def _index_runs(index: Callable[[Tensor], Any]) -> int:
    """How often `index` runs again in backward, of the two units that run it in forward; checks the gradients."""

    def gathers(unit: Unit, hidden: Tensor) -> Tensor:
        return hidden.sin()[index(hidden)].cos().sum(0) + hidden

    check(lambda: Unit(gathers), FULL)
    model, data = built(lambda: Unit(gathers))
    with apply_policy(model, ["units.0", "units.1"], FULL), Watch() as watch:
        gradients(model, data)
    return watch.ops["index"] - 2


@pytest.mark.parametrize(
    ("index", "num_again"),
    [
        (lambda hidden: hidden[:, 0].topk(3).indices, 2),
        (lambda hidden: (slice(None), hidden[0].topk(WIDTH).indices), 2),
        (lambda hidden: hidden[:, 0] > 0, 0),
        (lambda hidden: (hidden[:, 0] > 0).to(torch.uint8), 0),
    ],
    ids=["integers", "second dimension", "mask", "bytes"],
)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_gathers_run_again_unless_a_mask_decides_their_shape(index: Callable[[Tensor], Any], num_again: int) -> None:
    assert _index_runs(index) == num_again
