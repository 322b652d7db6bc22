"""What ops have to do, and how long that takes by the cost model."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from recollect.costs.hardware import ArithmeticRate, Hardware
from recollect.costs.op_work import work_of
from recollect.costs.roofline import FREE, Work, seconds
from recollect.engine.facts import facts_of
from small_hardware import SMALL

aten = torch.ops.aten


def work(func: Any, *args: Any, **kwargs: Any) -> Work:
    return work_of(func, facts_of(func), args, kwargs, func(*args, **kwargs))


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


# Traffic.


def test_elementwise_reads_and_writes() -> None:
    assert work(aten.add.Tensor, ones(10, 8), ones(10, 8)).traffic_bytes == 3 * 320
    assert work(aten.mul.Scalar, ones(10, 8, dtype=torch.bfloat16), 2.0).traffic_bytes == 2 * 160
    assert work(aten.add.Tensor, ones(10, 8), ones(10, 8)).kind == "elementwise"


def test_in_place_ops_write_where_they_read() -> None:
    assert work(aten.add_.Tensor, ones(10, 8), ones(10, 8)).traffic_bytes == 3 * 320
    assert work(aten.mul_.Scalar, ones(10, 8), 2.0).traffic_bytes == 2 * 320
    assert work(aten.zero_.default, ones(10, 8)).traffic_bytes == 320
    assert work(aten.copy_.default, ones(10, 8), ones(10, 8)).traffic_bytes == 2 * 320


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.view.default, (ones(4, 4), [16])),
        (aten.t.default, (ones(4, 4),)),
        (aten._unsafe_view.default, (ones(4, 4), [16])),
        (aten.expand.default, (ones(1), [1000])),
        (aten.squeeze_.default, (ones(4, 1),)),
        (aten.empty.memory_format, ([1000],)),
        (aten._conj.default, (ones(4, dtype=torch.complex64),)),
    ],
)
def test_views_and_empty_are_free(func: Any, args: Any) -> None:
    assert work(func, *args) == FREE
    assert seconds(FREE, SMALL) == 0.0


def test_lookups_read_what_they_look_up() -> None:
    table, indices = ones(100_000, 16), torch.zeros(5, dtype=torch.int64)
    rows = 5 * 16 * 4
    for func, args in ((aten.embedding.default, (table, indices)), (aten.index_select.default, (table, 0, indices))):
        assert work(func, *args).traffic_bytes == 2 * rows + 40
        assert work(func, *args).elements == 80
    loss = work(aten.nll_loss_forward.default, ones(100, 1000), torch.zeros(100, dtype=torch.int64), None, 1, -100)
    assert loss.traffic_bytes == 100 * 4 + 100 * 8 + 2 * 4  # a number of each row, its index, the loss and the weight
    # A lookup of more than there is cannot read more than there is.
    assert work(aten.embedding.default, ones(2, 16), torch.zeros(50, dtype=torch.int64)).traffic_bytes == (
        2 * 16 * 4 + 50 * 8 + 50 * 16 * 4
    )


def test_scatters_in_place_touch_the_rows_that_they_add_to() -> None:
    table, rows, indices = ones(100_000, 16), ones(5, 16), torch.zeros(5, dtype=torch.int64)
    assert work(aten.index_put_.default, table, [indices], rows, True).traffic_bytes == 3 * 320 + 40
    assert work(aten.index_add.default, table, 0, indices, rows).traffic_bytes == 2 * table.nbytes + 320 + 40
    backward = work(aten.embedding_dense_backward.default, rows, indices, 1000, -1, False)
    assert backward.traffic_bytes == 320 + 40 + 1000 * 16 * 4
    assert backward.kind == "scatter"


@pytest.mark.parametrize(
    ("func", "args", "kind"),
    [
        (aten.silu.default, (ones(4),), "transcendental"),
        (aten.sum.default, (ones(4),), "reduction"),
        (aten._softmax.default, (ones(4), 0, False), "softmax"),
        (aten.bernoulli_.float, (ones(4), 0.5), "random"),
        (aten.native_dropout.default, (ones(4), 0.5, True), "random"),
        (aten.topk.default, (ones(4), 2), "sort"),
        (aten.cat.default, ([ones(4), ones(4)],), "copy"),
        (aten._to_copy.default, (ones(4),), "copy"),
        (aten.native_layer_norm.default, (ones(2, 4), [4], None, None, 1e-5), "reduction"),
    ],
)
def test_kinds(func: Any, args: Any, kind: str) -> None:
    assert work(func, *args).kind == kind


# Arithmetic.


def test_products() -> None:
    found = work(aten.mm.default, ones(8, 16), ones(16, 32))
    assert (found.kind, found.flops, found.outputs, found.dtype) == ("matmul", 2 * 8 * 16 * 32, 8 * 32, "fp32")
    assert work(aten.bmm.default, ones(3, 8, 16), ones(3, 16, 32)).flops == 3 * found.flops
    half = work(aten.addmm.default, ones(32).bfloat16(), ones(8, 16).bfloat16(), ones(16, 32).bfloat16())
    assert (half.flops, half.dtype) == (found.flops, "bf16")


def test_grouped_products() -> None:
    tokens, experts = ones(24, 16, dtype=torch.bfloat16), ones(3, 16, 32, dtype=torch.bfloat16)
    offsets = torch.tensor([8, 16, 24], dtype=torch.int32)
    forward = work(aten._grouped_mm.default, tokens, experts, offsets)
    assert (forward.flops, forward.outputs) == (2 * 24 * 16 * 32, 24 * 32)
    # The gradient of the experts: the groups split the depth.
    gradient = work(aten._grouped_mm.default, tokens.t(), ones(24, 32, dtype=torch.bfloat16), offsets)
    assert gradient.flops == 2 * 16 * 24 * 32


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        (torch.ones(()), "fp8"),
        (torch.ones(256, 1), "fp8"),
        (torch.ones(256, 2), "fp8_blockwise"),
        (torch.ones(256 * 8, dtype=torch.float8_e8m0fnu), "mxfp8"),
    ],
    ids=lambda part: str(part)[:13],
)
def test_scaled_products(scale: Tensor, dtype: str) -> None:
    left, right = (torch.empty(256, 256, dtype=torch.float8_e4m3fn, device="meta") for _ in range(2))
    bias, out = torch.empty(256, dtype=torch.bfloat16), torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    args = left, right.t(), scale, scale, bias
    found = work_of(aten._scaled_mm.default, facts_of(aten._scaled_mm.default), args, {}, out)
    assert (found.kind, found.flops, found.dtype) == ("matmul", 2 * 256**3, dtype)


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("tf32")
def test_tf32_where_pytorch_is_told_to_use_it() -> None:
    assert work(aten.mm.default, ones(8, 16), ones(16, 32)).dtype == "tf32"
    assert work(aten.mm.default, ones(8, 16).bfloat16(), ones(16, 32).bfloat16()).dtype == "bf16"


def attention(is_causal: bool) -> list[Work]:
    """The work of the CPU's kernels, forward and backward, as autograd calls them."""
    found = []

    class Notes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            if "attention" in str(func):
                found.append(work_of(func, facts_of(func), args, kwargs or {}, output))
            return output

    query = torch.ones(2, 4, 16, 8, requires_grad=True)
    with Notes():
        scaled_dot_product_attention(query, ones(2, 4, 32, 8), ones(2, 4, 32, 8), is_causal=is_causal).sum().backward()
    return found


def test_attention() -> None:
    forward, backward = attention(is_causal=False)
    product = 2 * 2 * 4 * 16 * 32 * 8
    assert (forward.kind, backward.kind) == ("attention", "attention_backward")
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)


def test_causal_attention_is_half() -> None:
    for full, causal in zip(attention(is_causal=False), attention(is_causal=True), strict=True):
        assert causal.flops == full.flops / 2


# Seconds.

PLAIN = Hardware(
    name="plain",
    device="cuda",
    memory_bytes=2**30,
    bandwidth_bytes_per_s=1e9,
    traffic_efficiency=0.5,
    launch_s=1e-6,
    rates=(
        ArithmeticRate("fp32", 1e9, 0.5, 0.25, 0.125),
        ArithmeticRate("bf16", 8e9, 0.5, half_rate_outputs=64.0, half_rate_depth=16.0),
    ),
    elements_per_s={"random": 1e6},
)


def test_launch_is_the_least() -> None:
    assert seconds(Work("elementwise", 0.0, 0.0), PLAIN) == 1e-6


def test_arithmetic_is_the_limit() -> None:
    product = Work("matmul", 1.0, 0.0, flops=1e9, outputs=1e3)
    assert seconds(product, PLAIN) == pytest.approx(1e-6 + 2.0)
    assert seconds(Work("attention", 1.0, 0.0, flops=1e9, outputs=1e3), PLAIN) == pytest.approx(1e-6 + 4.0)
    assert seconds(Work("attention_backward", 1.0, 0.0, flops=1e9, outputs=1e3), PLAIN) == pytest.approx(1e-6 + 8.0)


def test_small_products_are_slower() -> None:
    """At the half-rate outputs and the half-rate depth, each halves the rate."""
    flops = 2 * 64.0 * 16.0
    at_half = Work("matmul", 0.0, 0.0, dtype="bf16", flops=flops, outputs=64.0)
    assert seconds(at_half, PLAIN) == pytest.approx(1e-6 + 4 * flops / 4e9)
    large = Work("matmul", 0.0, 0.0, dtype="bf16", flops=2 * 1e9 * 1e6, outputs=1e9)
    assert seconds(large, PLAIN) == pytest.approx(2e15 / 4e9, rel=1e-4)


def test_what_fits_into_the_cache_is_faster() -> None:
    in_cache, beyond = (seconds(Work("copy", 2.0**20 * n, 1.0), SMALL) - SMALL.launch_s for n in (1, 2))
    assert in_cache == pytest.approx(2**20 / SMALL.cache_bytes_per_s)
    assert beyond - in_cache == pytest.approx(2**20 / (SMALL.bandwidth_bytes_per_s * SMALL.traffic_efficiency))
