"""Check one architecture on the graph engine: which of its layers run from a trace, how long tracing takes, and every bit."""

from __future__ import annotations

import copy
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy
import torch
import transformers
from torch import nn

import recollect
from architectures.inputs import batch_for, loss_of
from architectures.small_config import small_config
from architectures.subjects import Subject
from recollect.engine.content import has_same_bits
from recollect.engine.graph.graph_engine import GraphForward

__all__ = ["CheckedTraces", "TracedVerdict", "check_traces"]

TracedVerdict = Literal[
    "traced", "on the tape", "no plan", "different", "crashed", "too slow", "not built", "not repeatable"
]
_STEPS = 3
_RATE = 0.01

Bits = dict[str, torch.Tensor]


@dataclass(frozen=True)
class CheckedTraces:
    """What was found.

    Attributes:
        task: what transformers lists the class for.
        class_name: the class.
        verdict: "traced" if every planned layer runs from a trace, "on the tape" if some do not, and "no plan" if no layer can
            recompute anything; in each case with equal bits.
        reason: why not; empty for "traced".
        kinds: for each class of layers: how many there are, and how many run from a trace.
        why_not: for each class of layers that do not, the first reason.
        traces: number of traces.
        trace_s: processor time of tracing.
        own_s: the part of it that is not Dynamo's.
    """

    task: str
    class_name: str
    verdict: TracedVerdict = "traced"
    reason: str = ""
    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)
    why_not: dict[str, str] = field(default_factory=dict)
    traces: int = 0
    trace_s: float = 0.0
    own_s: float = 0.0

    def row(self) -> dict[str, Any]:
        """Return the fields, as they are written to the results."""
        return asdict(self)


def check_traces(subject: Subject) -> CheckedTraces:
    """Build a model, train it three steps without a plan and from traces, each layer at its leanest; compare all bits."""
    found = CheckedTraces(subject.task, subject.class_name)
    try:
        torch.manual_seed(0)
        model = getattr(transformers, subject.class_name)(small_config(subject.config_class)).train()
        batch = batch_for(subject, model)
        plain = copy.deepcopy(model)
        expected = _train(plain, batch)
    except Exception as error:
        return replace(found, verdict="not built", reason=_reason(error))
    if not all(expected[f"loss of step {number}"].isfinite() for number in range(1, _STEPS + 1)):
        return replace(found, verdict="not built", reason="training without a plan diverges")
    start = copy.deepcopy(model)
    try:
        found, got = _trained_from_traces(found, model, batch)
    except Exception as error:
        return replace(found, verdict="crashed", reason=_reason(error))
    if (name := _first_difference(expected, got)) is None:
        return found
    if _first_difference(expected, _train(start, batch)) is not None:
        return replace(found, verdict="not repeatable", reason=f"{name} of two runs without a plan")
    return replace(found, verdict="different", reason=name)


def _trained_from_traces(found: CheckedTraces, model: nn.Module, batch: dict[str, Any]) -> tuple[CheckedTraces, Bits]:
    _seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profile = recollect.record(model, batch, loss_fn=loss_of)
        plan = recollect.classic_plan(profile, "full").with_engine("graph")
        with recollect.apply(model, plan) as applied, _clocks() as clocks:
            forwards = [forward for forward in applied._forwards if isinstance(forward, GraphForward)]
            got = _train(model, batch)
    kinds: dict[str, tuple[int, int]] = {}
    why_not: dict[str, str] = {}
    for forward in forwards:
        name = type(forward.module).__name__
        number, traced = kinds.get(name, (0, 0))
        is_traced = not forward.why_not and bool(forward._has_traced)
        kinds[name] = number + 1, traced + is_traced
        if not is_traced:
            why_not.setdefault(name, forward.why_not or "no call of a kind came twice")
    found = replace(
        found,
        verdict="no plan" if not forwards else "on the tape" if why_not else "traced",
        reason="; ".join(dict.fromkeys(why_not.values())),
        kinds=kinds,
        why_not=why_not,
        traces=clocks["traces"],
        trace_s=round(clocks["all"], 2),
        own_s=round(clocks["own"], 2),
    )
    return found, got


def _train(model: nn.Module, batch: dict[str, Any]) -> Bits:
    """Train three steps and return every loss and gradient, and all that they leave."""
    _seed()
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    left: Bits = {}
    for number in range(1, _STEPS + 1):
        optimizer.zero_grad()
        loss = loss_of(model(**batch))
        loss.backward()
        left[f"loss of step {number}"] = loss.detach().clone()
        left |= {
            f"gradient of {name} in step {number}": parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        optimizer.step()
    left |= {f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()}
    return {**left, "random state": torch.get_rng_state()}


def _seed() -> None:
    torch.manual_seed(1)
    # What transformers masks in sound is drawn by NumPy.
    numpy.random.seed(1)
    random.seed(1)


@contextmanager
def _clocks() -> Iterator[dict[str, Any]]:
    """Measure the processor time of tracing, and of what is done there after Dynamo."""
    from recollect import _torch_dynamo

    clocks: dict[str, Any] = {"all": 0.0, "own": 0.0, "traces": 0}
    tracing, traced = _torch_dynamo.tracing_as_eager, GraphForward.traced

    @contextmanager
    def timed_tracing() -> Iterator[None]:
        start = time.process_time()
        try:
            with tracing():
                yield
        finally:
            clocks["all"] += time.process_time() - start

    def timed_own(*args: Any) -> Any:
        start = time.process_time()
        clocks["traces"] += 1
        try:
            return traced(*args)
        finally:
            clocks["own"] += time.process_time() - start

    replacements: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (_torch_dynamo, "tracing_as_eager", timed_tracing),
        (GraphForward, "traced", timed_own),
    )
    before = [getattr(owner, name) for owner, name, _ in replacements]
    for owner, name, timed in replacements:
        setattr(owner, name, timed)
    try:
        yield clocks
    finally:
        for (owner, name, _), original in zip(replacements, before, strict=True):
            setattr(owner, name, original)


def _first_difference(one: Bits, other: Bits) -> str | None:
    if one.keys() != other.keys():
        return next(iter(one.keys() ^ other.keys()))
    return next((name for name in one if not has_same_bits(one[name], other[name])), None)


def _reason(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first[:160]}"
