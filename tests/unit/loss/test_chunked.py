"""The chunked cross entropy against PyTorch's own, and both against float64."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rank_threads import run_on_threads
from recollect import chunked_cross_entropy, measure_peak
from recollect.errors import ChunkedLossError
from recollect.loss.deferred import DeferredLogits, LossCall
from recollect.ranks.group import Group

TOKENS, HIDDEN, WORDS = 50, 24, 307
LossOf = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Of the plain model's own error against float64. Sums over chunks are other sums, each as good as the plain one: 0.8 to 1.2
# of its error in the grid below. One token a chunk is left out: there BLAS sums a product of a vector naively (4 times).
NO_WORSE = 1.5
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def softcap(logits: Tensor) -> Tensor:
    return 5 * torch.tanh(logits / 5)


def case(dtype: torch.dtype, compute: torch.dtype | None = None) -> list[Tensor]:
    """Hidden states, weight, bias, labels; the first three hold numbers of `dtype` in the dtype `compute`."""
    torch.manual_seed(1)
    made = [torch.randn(5, TOKENS // 5, HIDDEN), 0.3 * torch.randn(WORDS, HIDDEN), torch.randn(WORDS)]
    labels = torch.randint(WORDS, (5, TOKENS // 5))
    labels.flatten()[::7] = -100
    return [*(t.to(dtype).to(compute or dtype).requires_grad_() for t in made), labels]


def plain(transform: Callable[[Tensor], Tensor] | None = None, **options: Any) -> LossOf:
    def loss_of(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(hidden, weight, bias).flatten(0, 1)
        logits = logits if transform is None else transform(logits)
        wide = logits if logits.dtype is torch.float64 else logits.float()
        return F.cross_entropy(wide, labels.flatten(), **options)

    return loss_of


def chunked(num_chunks: int, **options: Any) -> LossOf:
    return lambda hidden, weight, bias, labels: chunked_cross_entropy(
        hidden, weight, labels, num_chunks=num_chunks, bias=bias, **options
    )


def step(loss_of: LossOf, tensors: list[Tensor], factor: float = 1.0) -> list[Tensor]:
    """The loss, and the gradients of hidden states, weight and bias."""
    loss = loss_of(*tensors)
    (loss * factor).backward()
    return [loss.detach(), *(t.grad for t in tensors[:3] if t.grad is not None)]


def errors(got: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((g.double() - e).norm() / e.norm()) for g, e in zip(got, exact, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_chunks", [1, 3, 8])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"transform": softcap}, {"ignore_index": 5}],
    ids=["mean", "sum", "smoothed", "softcapped", "other ignored label"],
)
def test_no_further_from_float64_than_the_plain_loss(
    dtype: torch.dtype, num_chunks: int, options: dict[str, Any]
) -> None:
    labels_fit = options.get("ignore_index", -100) == -100
    tensors = [case(dtype), case(dtype), case(dtype, torch.float64)]
    if not labels_fit:
        for made in tensors:
            made[3] = torch.where(made[3] == -100, 5, made[3])
    exact = step(plain(**options), tensors[2], factor=0.25)
    got = errors(step(chunked(num_chunks, **options), tensors[0], factor=0.25), exact)
    own = errors(step(plain(**options), tensors[1], factor=0.25), exact)
    # The reference is no more exact than fp64 itself; scalars are off by a few units of the last place at most.
    floor = 64 * torch.finfo(torch.float64).eps if dtype is torch.float64 else 2e-7
    for mine, plains in zip(got, own, strict=True):
        assert mine <= NO_WORSE * plains + floor


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs PyTorch with the gloo backend")
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"transform": softcap}],
    ids=["mean", "sum", "smoothed", "softcapped"],
)
def test_parts_of_the_vocabulary_have_the_loss_and_the_gradients_of_the_whole(options: dict[str, Any]) -> None:
    """Two ranks have a part each, the first of one word more."""
    hidden, weight, bias, labels = (tensor.detach() for tensor in case(torch.float64))
    half = WORDS // 2 + 1
    labels[0, 1:5] = torch.tensor([0, half - 1, half, WORDS - 1])  # The first and the last word of each part.

    def of_part(_: Group) -> list[Tensor]:
        rank = dist.get_rank()
        part = [tensor.clone().requires_grad_() for tensor in (hidden, weight.chunk(2)[rank], bias.chunk(2)[rank])]
        return step(chunked(3, group=dist.group.WORLD, **options), [*part, labels])

    first, second = run_on_threads(of_part)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    found = [*first[:2], *(torch.cat(parts) for parts in zip(first[2:], second[2:], strict=True))]
    whole = [*(tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)), labels]
    for got, exact in zip(found, step(plain(**options), whole), strict=True):
        assert torch.allclose(got, exact, rtol=1e-12, atol=1e-14)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs PyTorch with the gloo backend")
def test_a_part_of_words_that_a_transform_rules_out_counts_for_nothing() -> None:
    """As the last rank's, where a vocabulary is padded to a multiple."""
    hidden, words, bias = torch.randn(1, 6, 8), torch.randn(8, 8), torch.zeros(4)
    labels = torch.randint(4, (1, 6))

    def of_part(_: Group) -> list[Tensor]:
        rank = dist.get_rank()

        def transform(logits: Tensor) -> Tensor:
            return logits.masked_fill(torch.tensor(rank == 1), -torch.inf)

        part = [hidden.clone().requires_grad_(), words.chunk(2)[rank].clone().requires_grad_(), bias, labels]
        return step(chunked(2, group=dist.group.WORLD, transform=transform), part)

    first, second = run_on_threads(of_part)
    expected = step(plain(), [hidden.clone().requires_grad_(), words[:4].clone().requires_grad_(), bias, labels])
    for found in (first, second):
        assert torch.allclose(found[0], expected[0]) and torch.allclose(found[1], expected[1], atol=1e-6)
    assert torch.allclose(first[2], expected[2], atol=1e-6)
    assert not second[2].any()


@pytest.mark.parametrize("empty", [False, True], ids=["all ignored", "no tokens"])
def test_nothing_that_counts_is_nan_as_in_pytorch(empty: bool) -> None:
    def tensors() -> list[Tensor]:
        hidden, weight, bias, labels = case(torch.float32)
        hidden = (hidden[:0] if empty else hidden).detach().requires_grad_()
        return [hidden, weight, bias, torch.full_like(labels, -100)[: hidden.shape[0]]]

    expected, got = step(plain(), tensors()), step(chunked(4), tensors())
    assert expected[0].isnan()
    assert got[0].isnan()
    for left, right in zip(expected[1:], got[1:], strict=True):
        assert torch.equal(left, right)
        assert not right.any()


def test_labels_beyond_the_vocabulary_are_an_error() -> None:
    hidden, weight, bias, labels = case(torch.float32)
    labels[0, 3] = WORDS
    with pytest.raises((IndexError, RuntimeError), match="out of (bounds|range)"):
        chunked(4)(hidden, weight, bias, labels)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias", "all"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    tensors = case(torch.float64)
    names = ["hidden", "weight", "bias"]
    for name, tensor in zip(names, tensors, strict=False):
        tensor.requires_grad_(frozen not in (name, "all"))
    if frozen == "all":
        assert not chunked(4)(*tensors).requires_grad
        return
    step(chunked(4), tensors)
    exact = dict(zip(names, step(plain(), case(torch.float64))[1:], strict=True))
    for name, tensor in zip(names, tensors, strict=False):
        assert (tensor.grad is None) == (name == frozen)
        assert tensor.grad is None or torch.allclose(tensor.grad, exact[name], rtol=1e-12)


def test_only_one_chunk_is_alive_and_only_wanted_gradients() -> None:
    tokens, words, width, num_chunks = 256, 4096, 16, 8
    hidden, labels = torch.randn(tokens, width), torch.randint(words, (tokens,))
    chunk_bytes = tokens // num_chunks * words * 4
    weight_bytes = words * width * 4

    def peak(*, grad: bool) -> int:
        weight = torch.randn(words, width, requires_grad=grad)
        return measure_peak(
            lambda: chunked_cross_entropy(hidden, weight, labels, num_chunks=num_chunks)
        ).peak_growth_bytes

    # A tenth of a chunk for one number a token.
    assert chunk_bytes < peak(grad=False) < 1.1 * chunk_bytes
    assert chunk_bytes + weight_bytes < peak(grad=True) < 1.1 * chunk_bytes + weight_bytes
    with torch.no_grad():
        assert peak(grad=True) < 1.1 * chunk_bytes


def test_backward_uses_up_its_gradients() -> None:
    """No second copy of the weight's gradient, which is as large as the weight."""
    weight = torch.randn(4096, 256, requires_grad=True)
    labels = torch.randint(4096, (8,))
    loss = chunked_cross_entropy(torch.randn(8, 256), weight, labels, num_chunks=2) * 0.5
    assert measure_peak(loss.backward).peak_growth_bytes < 0.1 * weight.nbytes


def test_several_backwards() -> None:
    hidden, weight, bias, labels = case(torch.float64)
    loss = chunked(3)(hidden, weight, bias, labels)
    inputs = [hidden, weight, bias]
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    doubled = torch.autograd.grad(2 * loss, inputs, retain_graph=True)
    last = torch.autograd.grad(loss, inputs)
    for a, b, c in zip(first, doubled, last, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(2 * a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs)


def test_gradients_of_gradients_are_an_error() -> None:
    hidden, weight, bias, labels = case(torch.float64)
    loss = chunked(3)(hidden, weight, bias, labels)
    with pytest.raises(
        ChunkedLossError, match="create_graph=True, but its gradients are computed in forward.*loss_chunks=1"
    ):
        torch.autograd.grad(loss, weight, create_graph=True)


def test_embedding_tied_to_the_head() -> None:
    _, weight, bias, labels = case(torch.float64)
    words = torch.randint(WORDS, labels.shape)
    grads = []
    for loss_of in (plain(), chunked(3)):
        grads.append(torch.autograd.grad(loss_of(F.embedding(words, weight), weight, bias, labels), weight)[0])
    assert torch.allclose(*grads, rtol=1e-12)


def test_autocast_computes_in_its_dtype() -> None:
    """Weights in fp32, products in bf16: the gradients are as near as those of autocast's own."""
    exact = step(plain(), case(torch.float32, torch.float64))
    found = []
    for loss_of in (plain(), chunked(4)):
        tensors = case(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(*tensors)
        loss.backward()
        assert loss.dtype is torch.float32
        assert all(t.grad is not None and t.grad.dtype is torch.float32 for t in tensors[:3])
        found.append(errors([loss.detach(), *(t.grad for t in tensors[:3] if t.grad is not None)], exact))
    for own, mine in zip(*found, strict=True):
        assert 1e-4 < own or own < 1e-3
        assert mine <= NO_WORSE * own + 1e-4  # the loss is one number, exact to 1e-4 by luck in either
    with torch.autocast("cpu", torch.bfloat16):
        assert chunked(4)(*case(torch.float64)).dtype is torch.float64


def test_fp16_gradients_do_not_vanish_before_the_scaler() -> None:
    """One of 1e5 tokens has a gradient of 1e-5 / words a logit: less than fp16 can hold, more than it needs to."""
    hidden = torch.ones(100_000, 1, dtype=torch.float16)
    weight = torch.zeros(64, 1, dtype=torch.float16, requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight, torch.zeros(100_000, dtype=torch.int64), num_chunks=4)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad[1:].flatten().tolist() == pytest.approx([1 / 64] * 63, rel=1e-3)


def test_under_torch_compile() -> None:
    expected = step(plain(), case(torch.float32))
    got = step(torch.compile(chunked(3), backend="aot_eager"), case(torch.float32))
    assert max(errors(got, [e.double() for e in expected])) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_chunks": 0}, r"num_chunks: got 0, expected 1 or more"),
        ({"reduction": "none"}, r"reduction: got 'none', expected 'mean' or 'sum'.*loss_chunks=1"),
        ({"label_smoothing": 2.0}, r"label_smoothing: got 2.0, expected 0 to 1"),
        (
            {"weight": torch.zeros(7, 5)},
            r"got hidden \[5, 10, 24\] and weight \[7, 5\], expected \[..., D\] and \[V, D\]",
        ),
        ({"bias": torch.zeros(3)}, r"got bias \[3\], expected \[307\]"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"got labels torch.int64 \[4\], expected int64 \[5, 10\]"),
        ({"labels": torch.zeros(5, 10)}, r"got labels torch.float32 \[5, 10\], expected int64"),
        (
            {"transform": lambda logits: logits * torch.ones((), requires_grad=True).exp()},
            r"transform reads a tensor that requires grad.*Detach it",
        ),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    hidden, weight, bias, labels = case(torch.float32)
    arguments: dict[str, Any] = {"weight": weight, "bias": bias, "labels": labels, "num_chunks": 2, **change}
    with pytest.raises(ChunkedLossError, match=message):
        chunked_cross_entropy(hidden, **arguments)


def test_a_weight_whose_memory_was_freed_is_an_error() -> None:
    hidden, weight, _, labels = case(torch.float32)
    weight.untyped_storage().resize_(0)
    with pytest.raises(ChunkedLossError, match="its storage was freed, as FSDP does"):
        chunked_cross_entropy(hidden, weight, labels, num_chunks=2)


# What a model's own code may do between its head and its loss.

ALLOWED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "float and view": lambda x, y: F.cross_entropy(x.float().view(-1, WORDS), y.view(-1)),
    "reshape by size": lambda x, y: F.cross_entropy(x.reshape(-1, x.size(-1)), y.flatten()),
    "view with a free end": lambda x, y: F.cross_entropy(x.view(TOKENS, -1), y.flatten()),
    "flatten, sum over a count": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum") / 40,
    "shifted logits": lambda x, y: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, x.shape[-1]), y[..., 1:].reshape(-1)
    ),
    "cut sequences": lambda x, y: F.cross_entropy(x[1:3].flatten(end_dim=-2), y[1:3].flatten()),
    "cut before dots": lambda x, y: F.cross_entropy(x[1:3, ...].flatten(end_dim=-2), y[1:3].flatten()),
    "a module as loss": lambda x, y: torch.nn.CrossEntropyLoss(label_smoothing=0.1)(
        x.to(x.device).view(-1, WORDS), y.view(-1)
    ),
    "softcap": lambda x, y: F.cross_entropy((torch.tanh(x / 5) * 5).view(-1, WORDS), y.view(-1)),
    "scaled in fp32": lambda x, y: F.cross_entropy((2.5 * x.float()).view(-1, WORDS), y.view(-1)),
    "scaled by a tensor": lambda x, y: F.cross_entropy((x * torch.tensor(0.5)).view(-1, WORDS), y.view(-1)),
}


def deferred(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, LossCall]:
    call = LossCall("Some", 4)
    return DeferredLogits.of_head(call, hidden, weight, bias), call


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALLOWED)
def test_what_models_do_to_logits(name: str, dtype: torch.dtype) -> None:
    expected_tensors, tensors = case(dtype), case(dtype)
    hidden, weight, bias, labels = expected_tensors
    expected = ALLOWED[name](F.linear(hidden, weight, bias), labels)
    expected.backward()
    hidden, weight, bias, labels = tensors
    logits, call = deferred(hidden, weight, bias)
    got = ALLOWED[name](logits, labels)
    assert call.has_loss
    assert got.dtype is expected.dtype
    got.backward()
    # bf16: a unit in the last place of a norm; fp64: the fp32 of those that cast to it.
    tolerance = 1e-2 if dtype is torch.bfloat16 else (1e-6 if "float" in name or "fp32" in name else 1e-14)
    exact = [expected.detach().double(), *(t.grad.double() for t in expected_tensors[:3] if t.grad is not None)]
    assert max(errors([got.detach(), *(t.grad for t in tensors[:3] if t.grad is not None)], exact)) < tolerance


@pytest.mark.parametrize("at_head", [True, False], ids=["at the head", "at the loss"])
def test_products_are_in_the_dtype_of_autocast_at_the_head(at_head: bool) -> None:
    def loss(head: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        hidden, weight, bias, labels = case(torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=at_head):
            logits = head(hidden, weight, bias)
        with torch.autocast("cpu", torch.bfloat16, enabled=not at_head):
            found = F.cross_entropy(logits.float().view(-1, WORDS), labels.view(-1))
        found.backward()
        return [found.detach(), *(t.grad for t in (hidden, weight, bias) if t.grad is not None)]

    expected = [tensor.double() for tensor in loss(F.linear)]
    found = errors(loss(lambda *head: deferred(*head)[0]), expected)
    # As far off as sums in a different order are: in bf16, where the products are, a unit in the last place.
    assert max(found) < (1e-2 if at_head else 1e-6), found
    assert found[0] < 1e-6


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a part of the vocabulary": (lambda x, y: x[..., :-1], "__getitem__"),
    "most of the vocabulary": (lambda x, y: x[:, :, : WORDS - 1, ...], "__getitem__"),
    "the name of its type": (lambda x, y: x.type(), "type"),
    "a mask": (lambda x, y: x[y >= 0], "__getitem__"),
    "log-softmax": (lambda x, y: x.log_softmax(-1), "log_softmax"),
    "a z-loss": (lambda x, y: x.logsumexp(-1), "logsumexp"),
    "a sum with a tensor": (lambda x, y: x + torch.ones(WORDS), "add"),
    "a product with a tensor": (lambda x, y: x * torch.ones(WORDS), "mul"),
    "a learnt factor": (lambda x, y: x * torch.ones((), requires_grad=True), "mul"),
    "the inverse": (lambda x, y: 1 / x, "reciprocal|rdiv|div"),
    "a write": (lambda x, y: x.mul_(2), "mul_"),
    "everything in one row": (lambda x, y: x.flatten(), "flatten"),
    "vocabulary split": (lambda x, y: x.view(-1, 1), "view"),
    "words first": (lambda x, y: x.transpose(1, 2), "transpose"),
    "a look": (lambda x, y: x.argmax(-1), "argmax"),
    "fp64": (lambda x, y: x.double(), "double"),
    "class weights": (
        lambda x, y: F.cross_entropy(x.view(-1, WORDS), y.view(-1), torch.ones(WORDS)),
        "a weight for each class",
    ),
    "old flags": (lambda x, y: F.cross_entropy(x.view(-1, WORDS), y.view(-1), reduce=True), "size_average or reduce"),
    "probabilities": (
        lambda x, y: F.cross_entropy(x.view(-1, WORDS), torch.ones(TOKENS, WORDS)),
        r"logits \[50, 307\] and a target \[50, 307\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_logits_is_refused(name: str) -> None:
    hidden, weight, bias, labels = case(torch.float32)
    use, message = REFUSED[name]
    logits, _ = deferred(hidden, weight, bias)
    with pytest.raises(ChunkedLossError, match=f"its code (calls|gives) .*({message}).*Use loss_chunks=1"):
        use(logits, labels)


def test_deferred_logits_answer_what_is_asked_of_any_tensor() -> None:
    hidden, weight, bias, _ = case(torch.bfloat16)
    logits, call = deferred(hidden, weight, bias)
    assert (tuple(logits.shape), logits.dtype, logits.ndim, len(logits)) == ((5, 10, WORDS), torch.bfloat16, 3, 5)
    assert logits.size(-1) == WORDS
    assert logits.device == hidden.device
    assert isinstance(logits, Tensor)
    assert "never computed" in repr(logits)
    assert (call.has_logits, call.has_loss) == (True, False)
    with pytest.raises(ChunkedLossError):
        copy.deepcopy(logits)
