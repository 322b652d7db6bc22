"""Compare what two runs computed, bit for bit: results with their gradients, and the state that they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from recollect.engine.content import has_same_bits
from recollect.tensors import inner_tensors

Difference = tuple[str, float]


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What a run computed and left behind, by name.

    Attributes:
        gradients: the loss (or outputs), and each gradient that there is.
        state: copies of buffers and of random generators, after the run.
    """

    gradients: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a comparison of runs found.

    Attributes:
        num_compared: number of gradients, losses and outputs compared.
        difference: the first gradient (or loss, or output) that differs, and the largest absolute difference; None if all
            are equal.
        state_difference: the same for buffers and random generators.
        plain_difference: the first difference between two runs without a plan, if they were needed and differ.
    """

    num_compared: int = 0
    difference: Difference | None = None
    state_difference: Difference | None = None
    plain_difference: Difference | None = None

    def followed_by(self, later: Findings) -> Findings:
        """Add the findings of a later comparison; of differences, the first counts."""
        return Findings(
            num_compared=self.num_compared + later.num_compared,
            difference=self.difference or later.difference,
            state_difference=self.state_difference or later.state_difference,
            plain_difference=self.plain_difference or later.plain_difference,
        )

    def within(self, path: str) -> Findings:
        """Put a unit's path before the names."""

        def named(found: Difference | None) -> Difference | None:
            return None if found is None else (f"{path}: {found[0]}", found[1])

        return Findings(
            num_compared=self.num_compared,
            difference=named(self.difference),
            state_difference=named(self.state_difference),
            plain_difference=named(self.plain_difference),
        )


def state_after(module: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Copy what a run may have changed besides gradients: buffers, and the random generators of the CPU and the device."""
    state = {f"buffer {name}": buffer.detach().clone() for name, buffer in module.named_buffers()}
    state["random generator"] = torch.random.get_rng_state()
    if device.type == "cuda":
        state[f"random generator of {device}"] = torch.cuda.get_rng_state(device)
    return state


def compare_runs(
    expected: Computed, got: Computed, again: Callable[[], Computed], in_any: Callable[[bool], bool] = bool
) -> Findings:
    """Compare two runs.

    Args:
        expected: one of them.
        got: the other.
        again: runs once more what was expected; it is called only if something differs.
        in_any: tells whether something is so in any process of several that compare, and have to run it together.
    """
    difference = first_difference(expected.gradients, got.gradients)
    state_difference = first_difference(expected.state, got.state)
    plain_difference = None
    if in_any(bool(difference or state_difference)):
        repeated = again()
        plain_difference = first_difference(expected.gradients, repeated.gradients)
        plain_difference = plain_difference or first_difference(expected.state, repeated.state)
    return Findings(
        num_compared=len(expected.gradients),
        difference=difference,
        state_difference=state_difference,
        plain_difference=plain_difference,
    )


def first_difference(expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]) -> Difference | None:
    """Return the first name whose bits differ, or that only one side has, and the largest absolute difference.

    None if all are equal.
    """
    for name, tensor in expected.items():
        other = got.get(name)
        if other is None:
            return name, float("inf")
        if not has_same_bits(tensor, other):
            return name, largest_difference(tensor, other)
    return next(((name, float("inf")) for name in got if name not in expected), None)


def largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors; infinity if their shapes differ."""
    if left.shape != right.shape:
        return float("inf")
    inner, others = inner_tensors(left), inner_tensors(right)
    if (inner or others) and type(left) is not type(right):
        return float("inf")
    if inner:
        return max(largest_difference(one, other) for one, other in zip(inner, others, strict=True))
    difference = _widened(left) - _widened(right)
    return float(difference.abs().max()) if difference.numel() else 0.0


def furthest(expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]) -> Difference:
    """Return the name of the most different tensor, and the norm of the difference over the norm."""
    far = {}
    for name, tensor in expected.items():
        exact, other = _widened(tensor), _widened(got[name])
        norm = float(exact.norm())
        far[name] = float((exact - other).norm()) / norm if norm else float(other.norm())
    name = max(far, key=lambda name: far[name])
    return name, far[name]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)
