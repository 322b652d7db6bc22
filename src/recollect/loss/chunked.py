"""Compute LM head and cross entropy in chunks of tokens.

The logits of N tokens over a vocabulary of V are often the largest tensors of a step: the model holds them in its own dtype,
in fp32, as log-probabilities, and as gradients of each. Here they exist for one chunk at a time. Forward computes the
gradients of a chunk right after its loss, while the logits are alive; so nothing is computed twice, and backward only
multiplies. The idea comes from Liger-Kernel's fused linear cross entropy (P.-L. Hsu et al., "Liger Kernel: Efficient
Triton Kernels for LLM Training", 2024, section 3.2, https://arxiv.org/abs/2410.10989).

With p the softmax of a token's logits, y its label, and n the number of tokens not ignored:
    loss = -log p[y] / n        d loss / d logits = (p - onehot(y)) / n

NOTE [ Rounding ]
1. The loss and the gradient of the logits are computed in fp32 (fp64 for fp64), whatever the dtype of the matrices.
2. The gradient of the logits is rounded to the dtype of the matrix products after the division by n, as without chunks.
   Under fp16, where p / n would underflow, the division comes last, together with the gradient scaler's factor.
3. Gradients of weight and bias are summed over chunks in fp32 and rounded once, in backward: a bf16 sum would lose bits
   with each chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from recollect._torch_private import is_traceable_wrapper_subclass, keeps_graph, untraced
from recollect.errors import ChunkedLossError
from recollect.loss.vocabulary_part import VocabularyPart, WholeVocabulary, split_head

# Rows of the weight's gradient computed at once if the product has a different dtype than the sum: enough for a matrix product
# at full speed, few enough for its memory to be negligible.
_ROWS_AT_ONCE = 8192

Transform = Callable[[Tensor], Tensor]


@untraced
def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    num_chunks: int,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    transform: Transform | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute `cross_entropy(linear(hidden, weight, bias), labels)` without ever holding all logits.

    Gradients are exact: they differ from the two calls' only in the order of sums. Under autocast the products run
    in its dtype, otherwise in the dtype of `hidden`, to which `weight` is cast. Compiled code calls this uncompiled, with a
    graph break.

    Args:
        hidden: [..., D], input of the LM head.
        weight: [V, D], the LM head; may be tied to the embedding or frozen.
        labels: [...] int64, one token id for each row of `hidden`.
        num_chunks: parts that the tokens are split into, of equal size except the last; at most as many as tokens. The
            workspace is 4 to 8 bytes times V times the tokens of one part.
        bias: [V], added to the logits.
        ignore_index: the label of ignored tokens.
        reduction: "mean" over the tokens not ignored (nan if there are none, as in PyTorch), or "sum".
        label_smoothing: weight of the uniform distribution in the target, 0 to 1.
        transform: elementwise map from logits [tokens, V] to the input of the softmax, such as
            `lambda logits: 30 * torch.tanh(logits / 30)`. It reads no other tensor that requires grad.
        group: ranks among which the LM head is split along the vocabulary, in order, as under tensor parallelism.
            `weight` and `bias` are this rank's parts, or DTensors; `labels` are the same on all ranks, and so is
            `hidden`, whose gradient is summed over them. A `hidden` that is split along the sequence, a DTensor, is
            gathered.

    Returns:
        The loss, a scalar: fp32, or fp64 if the products are. With `group`, the same bits on all ranks; it is infinite if
        a label is beyond the vocabulary.

    Raises:
        ChunkedLossError: mismatched shapes, an unsupported reduction, a transform that reads what requires grad, a sharded
            weight without `group`, or one that is split differently; in backward, `create_graph=True`.

    Example:
        >>> import torch
        >>> hidden, weight = torch.randn(2, 5, 8), torch.randn(100, 8, requires_grad=True)
        >>> labels = torch.randint(100, (2, 5))
        >>> loss = chunked_cross_entropy(hidden, weight, labels, num_chunks=4)
        >>> plain = torch.nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())
        >>> torch.allclose(loss, plain)
        True
    """
    part = None
    if group is not None:
        hidden, weight, bias, part = split_head(hidden, weight, bias, group)
    device_type = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device_type) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    settings = _Settings(
        num_chunks=num_chunks,
        dtype=dtype,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        transform=transform,
        has_gradients=torch.is_grad_enabled(),
        part=part,
    )
    _check(hidden, weight, labels, bias, settings)
    with torch.autocast(device_type, enabled=False):
        return _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, -2), weight, bias, labels.flatten(), settings
        )


@dataclass(frozen=True)
class _Settings:
    num_chunks: int
    dtype: torch.dtype
    ignore_index: int
    reduction: Literal["mean", "sum"]
    label_smoothing: float
    transform: Transform | None
    has_gradients: bool
    part: VocabularyPart | None

    @property
    def divides_last(self) -> bool:
        """Whether the division by the number of tokens waits for backward; see NOTE [ Rounding ]."""
        return self.dtype is torch.float16

    @property
    def wide_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype is torch.float64 else torch.float32


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: _Settings
    ) -> Tensor:
        wanted = [needed and settings.has_gradients for needed in ctx.needs_input_grad[:3]]
        counts = labels != settings.ignore_index
        num_counted = counts.sum()
        divisor = num_counted.clamp(min=1) if settings.reduction == "mean" else torch.ones_like(num_counted)
        run = _Run(hidden.to(settings.dtype), weight.to(settings.dtype), bias, wanted, settings)
        loss = torch.zeros((), dtype=settings.wide_dtype, device=hidden.device)
        num_tokens = labels.numel()
        size = max(1, -(-num_tokens // settings.num_chunks))
        for begin in range(0, num_tokens, size):
            end = min(begin + size, num_tokens)
            loss += run.chunk(begin, end, labels[begin:end], counts[begin:end], divisor)
        if settings.reduction == "mean":
            loss /= num_counted  # by zero if nothing counts: nan, as PyTorch has it
        ctx.dtypes = [tensor.dtype if tensor is not None else None for tensor in (hidden, weight, bias)]
        ctx.divides_last = settings.divides_last
        ctx.part = settings.part
        ctx.save_for_backward(run.hidden_gradient, run.weight_gradient, run.bias_gradient, divisor)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if torch.is_grad_enabled():
            raise ChunkedLossError(
                "chunked_cross_entropy: got a backward with create_graph=True, but its gradients are computed in forward and "
                "have no graph. Use loss_chunks=1 for gradients of gradients."
            )
        (factor,) = grad_outputs
        *gradients, divisor = ctx.saved_tensors
        if ctx.divides_last:
            factor = factor / divisor
        # Saved gradients may be overwritten unless a second backward follows.
        is_last = not keeps_graph()
        scaled = [
            None if gradient is None else (gradient.mul_(factor) if is_last else gradient * factor).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        if scaled[0] is not None and ctx.part is not None and ctx.part.sums_hidden:
            dist.all_reduce(scaled[0], group=ctx.part.group)
        return (*scaled, None, None)


class _Run:
    """One forward: the matrices in the dtype of the products, and the gradients accumulated so far."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool], settings: _Settings
    ) -> None:
        self.hidden = hidden
        self.weight = weight
        self.bias = None if bias is None else bias.to(settings.dtype)
        self.settings = settings
        wants_hidden, self.wants_weight, wants_bias = wanted
        self.wants_any = any(wanted)
        self.hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        is_empty = self.wants_weight and not hidden.shape[0]
        self.weight_gradient = torch.zeros_like(weight) if is_empty else None
        self.bias_gradient = weight.new_zeros(weight.shape[0], dtype=settings.wide_dtype) if wants_bias else None

    def chunk(self, begin: int, end: int, labels: Tensor, counts: Tensor, divisor: Tensor) -> Tensor:
        """Accumulate the gradients of some tokens; return the sum of their losses."""
        hidden = self.hidden[begin:end]
        raw = F.linear(hidden, self.weight, self.bias)
        logits, seen = self._transformed(raw)
        if seen is None:
            del raw  # a low-precision copy, or the logits themselves
        loss = _loss_and_gradient(logits, labels, counts, divisor, self.settings, wants_gradient=self.wants_any)
        if not self.wants_any:
            return loss
        gradient = logits  # overwritten
        if seen is not None:
            (gradient,) = torch.autograd.grad(seen, raw, gradient.to(seen.dtype))
        gradient = gradient.to(self.settings.dtype)
        del logits
        if self.hidden_gradient is not None:
            torch.mm(gradient, self.weight, out=self.hidden_gradient[begin:end])
        if self.bias_gradient is not None:
            self.bias_gradient += gradient.sum(0, dtype=self.bias_gradient.dtype)
        if self.wants_weight:
            self._add_to_weight_gradient(gradient.t(), hidden)
        return loss

    def _transformed(self, raw: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the input of the softmax, in a tensor that may be overwritten, and the output of the transform's graph."""
        wide = self.settings.wide_dtype
        if self.settings.transform is None:
            return raw.to(wide), None
        with torch.enable_grad():
            seen = self.settings.transform(raw.requires_grad_())
        if _reads_weights(seen, raw):
            raise ChunkedLossError(
                "chunked_cross_entropy: transform reads a tensor that requires grad, such as a learnt scale, which would get "
                "no gradient. Detach it, or scale hidden by it instead."
            )
        return seen.detach().to(wide, copy=True), seen

    def _add_to_weight_gradient(self, gradient_T: Tensor, hidden: Tensor) -> None:
        """Accumulate [V, tokens] times [tokens, D]."""
        wide = self.settings.wide_dtype
        if self.weight_gradient is None and (self.settings.num_chunks == 1 or hidden.dtype is wide):
            self.weight_gradient = torch.mm(gradient_T, hidden)
            return
        if self.weight_gradient is None:
            self.weight_gradient = torch.zeros_like(self.weight, dtype=wide)
        sums = self.weight_gradient
        if hidden.dtype is wide:
            torch.addmm(sums, gradient_T, hidden, out=sums)
            return
        for rows, total in zip(gradient_T.split(_ROWS_AT_ONCE), sums.split(_ROWS_AT_ONCE), strict=True):
            total += torch.mm(rows, hidden)


def _reads_weights(result: Tensor, logits: Tensor) -> bool:
    """Whether a result depends on a tensor that requires grad besides the logits."""
    found, pending = set(), [result.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found.add(node)
            pending += [following for following, _ in node.next_functions]
    return any(getattr(node, "variable", logits) is not logits for node in found)


def _loss_and_gradient(
    logits: Tensor, labels: Tensor, counts: Tensor, divisor: Tensor, settings: _Settings, *, wants_gradient: bool
) -> Tensor:
    """Return the sum of the losses of some tokens; overwrite `logits` with their gradient."""
    part, smoothing = settings.part, settings.label_smoothing
    is_here = counts
    if part is not None:
        labels = labels - part.first
        is_here = counts & (labels >= 0) & (labels < logits.shape[1])
    target = torch.where(is_here, labels, 0).unsqueeze(1)
    found = _over_vocabulary(logits, target, is_here, settings)
    losses = found.total.log() - (1 - smoothing) * found.at_target - smoothing * found.mean_logit
    if wants_gradient:
        scale = counts.unsqueeze(1).to(logits.dtype)
        if not settings.divides_last:
            scale /= divisor
        share = scale / found.total
        logits *= share if found.factor is None else share.mul_(found.factor)
        if smoothing:
            logits -= scale * (smoothing / (logits.shape[1] if part is None else part.num_words))
        logits.scatter_add_(1, target, (smoothing - 1) * (scale if part is None else scale * is_here.unsqueeze(1)))
    return torch.where(counts, losses.squeeze(1), 0).sum()


def _over_vocabulary(logits: Tensor, target: Tensor, is_here: Tensor, settings: _Settings) -> WholeVocabulary:
    """Sum up over the vocabulary; overwrite `logits` with exponentials."""
    part, smoothing = settings.part, settings.label_smoothing
    # Finite: a transform may rule out all words of this rank, or of a token.
    greatest = logits.amax(1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    sums = logits.sum(1, keepdim=True) if smoothing and part is not None else None
    logits -= greatest
    at_target = logits.gather(1, target)
    mean_logit = logits.mean(1, keepdim=True) if smoothing and part is None else 0.0
    total = logits.exp_().sum(1, keepdim=True)
    if part is None:
        return WholeVocabulary(total, at_target, mean_logit)
    return part.together(greatest, total, torch.where(is_here.unsqueeze(1), at_target, -torch.inf), sums)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, settings: _Settings) -> None:
    def fail(what: str) -> None:
        raise ChunkedLossError(f"chunked_cross_entropy: {what}")

    if settings.num_chunks < 1:
        fail(f"num_chunks: got {settings.num_chunks}, expected 1 or more.")
    if settings.reduction not in ("mean", "sum"):
        fail(
            f"reduction: got {settings.reduction!r}, expected 'mean' or 'sum': gradients are computed in forward, where the "
            "weight of each token's own loss is not known yet. Use loss_chunks=1."
        )
    if not 0 <= settings.label_smoothing <= 1:
        fail(f"label_smoothing: got {settings.label_smoothing}, expected 0 to 1.")
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is not None and is_traceable_wrapper_subclass(tensor):
            fail(
                f"{name} is a {type(tensor).__name__} of shape {list(tensor.shape)}, expected a whole tensor. A head of its "
                "own under FSDP2 is gathered in its own forward only: shard it together with the root module. For a head under "
                "tensor parallelism give group=, or use loss_chunks=1."
            )
    if weight.dim() != 2 or hidden.dim() < 2 or hidden.shape[-1] != weight.shape[-1]:
        fail(f"got hidden {list(hidden.shape)} and weight {list(weight.shape)}, expected [..., D] and [V, D].")
    if bias is not None and bias.shape != weight.shape[:1]:
        fail(f"got bias {list(bias.shape)}, expected [{weight.shape[0]}], one number for each row of weight.")
    if labels.shape != hidden.shape[:-1] or labels.is_floating_point():
        fail(
            f"got labels {labels.dtype} {list(labels.shape)}, expected int64 {list(hidden.shape[:-1])}: one word for each "
            "row of hidden."
        )
    if weight.numel() and not weight.untyped_storage().nbytes():
        fail(
            "the weight has no memory now: its storage was freed, as FSDP does when it reshards a separate module. Shard "
            "the head together with the root module."
        )
