"""Lean recordings: a policy from a plan, excerpts of inputs, what is counted twice, and steps that are foreseen from one."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from recollect.attaching.placement import excess_of
from recollect.engine.content import has_same_bits
from recollect.engine.policy import DropAll
from recollect.plans.action import Action
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.events import ALLOC, BACKWARD, DIES, FORWARD, FREE, OP, OPTIMIZER, PHASE, RETURN, SAVE, StepLog
from recollect.profile.graph import OpRecord, UnitCall, UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recollect.recording.next_step import foreseen, with_copies
from recollect.recording.unit_samples import Excerpt, UnitSamples


def test_a_lean_plan_keeps_what_the_plan_names_and_drops_what_it_does_not() -> None:
    policy = DropAll(but={"a": UnitPlan({"h": "keep", "up": "recompute"}, output="recompute")})
    assert [policy.action("a", name) for name in ("h", "up", "new")] == [
        Action.KEEP,
        Action.RECOMPUTE,
        Action.RECOMPUTE,
    ]
    assert policy.output_action("a") is Action.RECOMPUTE
    assert (policy.action("b", "h"), policy.output_action("b")) == (Action.KEEP, Action.KEEP)
    assert (policy.acts_in("a", ""), policy.acts_in("b", "")) == (True, False)


_LAYOUTS = {
    "dense": torch.randn(3, 1000, 8),
    "transposed": torch.randn(8, 3, 1000).transpose(1, 2),
    "channels last": torch.randn(4, 8, 33, 33).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("tensor", _LAYOUTS.values(), ids=_LAYOUTS)
def test_an_excerpt_is_small_and_stands_for_a_tensor_of_the_same_layout(tensor: torch.Tensor) -> None:
    assert Excerpt.stands_for(tensor)
    excerpt = Excerpt(tensor)
    assert excerpt.part.nbytes <= tensor.nbytes / 10
    whole = excerpt.repeated()
    assert (whole.shape, whole.stride(), whole.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    dim = max(range(tensor.dim()), key=tensor.size)
    length = excerpt.part.size(dim)
    assert has_same_bits(whole.narrow(dim, 0, length), tensor.narrow(dim, 0, length))
    assert has_same_bits(whole.narrow(dim, length, 1), tensor.narrow(dim, 0, 1))


def test_a_sample_holds_excerpts_of_floats_only() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    samples = UnitSamples(model, torch.device("cpu"), in_excerpts=True)
    samples.take("0", 0, (torch.randn(512, 64), torch.arange(4096)), {})
    assert samples.held_bytes == 512 * 64 * 4 / 16 + 4096 * 8
    (sample,) = samples.of_graphs(_PROFILE).values()
    assert has_same_bits(sample.whole().args[1], torch.arange(4096))
    assert sample.whole().args[0].shape == (512, 64)


_GRAPH = UnitGraph(
    (ValueRecord("input", 0, None), ValueRecord("k", 64, 0, saved=True), ValueRecord("y", 8, 1, is_output=True)),
    (OpRecord("k", (0,), (1,), 1.0), OpRecord("y", (1,), (2,), 1.0)),
)
# The model holds `k` in a cache until the end.
_EVENTS = (
    *((PHASE, FORWARD), (OP, 0, 0), (SAVE, 0, 1, 0, 0), (OP, 0, 1), (RETURN, 0), (DIES, 0, 2)),
    *((PHASE, BACKWARD), (6, 0), (DIES, 0, 1)),
)
_PROFILE = Profile((_GRAPH,), (UnitCall("layer", 0),), StepLog(_EVENTS), step_s=1.0)


def test_what_the_model_holds_is_shared_with_nothing_that_is_kept() -> None:
    found = list(with_copies(_PROFILE).log.events)
    assert found[5:7] == [(DIES, 0, 1), (ALLOC, 0, 64)]
    assert found[-1] == (FREE, 0)


def test_an_excess_is_said_with_its_numbers() -> None:
    planned = SimpleNamespace(budget_bytes=2 << 20, peak_bytes=1 << 20, calls=["4 x 64"])
    recording = SimpleNamespace(peak_bytes=3 << 20)
    assert excess_of(cast(Any, recording), cast(Any, planned)) == (
        "while it was recorded, a step of 4 x 64 needed 3.0 MiB, 1.0 MiB more than the budget of 2.0 MiB, as nothing "
        "leaner was known for it; from now on steps like it need 1.0 MiB"
    )
    planned.budget_bytes = (3 << 20) - (32 << 10)
    assert excess_of(cast(Any, recording), cast(Any, planned)) == ""


_SMALL = UnitGraph((ValueRecord("h", 8, producer=0),), (OpRecord("h", (), (0,), 1.0, working_bytes=16),))
# Gradients of 100 and 7 bytes, and between them one of an activation, which dies.
_MICRO_STEPS = (
    *((PHASE, FORWARD), (OP, 0, 0), (RETURN, 0), (ALLOC, 0, 40)),
    *((PHASE, BACKWARD), (ALLOC, 1, 100), (ALLOC, 2, 40), (FREE, 2)),
    *((PHASE, FORWARD), (PHASE, BACKWARD), (ALLOC, 3, 7), (FREE, 0)),
    *((PHASE, OPTIMIZER), (ALLOC, 4, 9), (FREE, 4)),
)
_ACCUMULATED = Profile((_SMALL,), (UnitCall("layer", 0),), StepLog(_MICRO_STEPS), step_s=1.0)


@pytest.mark.parametrize(
    ("sizes", "at_phases"),
    [
        # At the start, before either backward, between them, and at the end; nothing makes one of 1000 bytes.
        ([7, 100, 1000], [[7, 100], [7, 40], [7, 40, 100], [40, 100], [7, 100]]),
        ([100], [[100], [40], [40, 100], [40, 100], [7, 100]]),
    ],
)
def test_a_gradient_is_alive_until_the_backward_that_makes_it_anew(
    sizes: list[int], at_phases: list[list[int]]
) -> None:
    alive, seen = {}, []
    for code, *operands in foreseen(_ACCUMULATED, gradients_bytes=sizes).log.events:
        if code == ALLOC:
            alive[operands[0]] = operands[1]
        elif code == FREE:
            del alive[operands[0]]
        elif code == PHASE:
            seen.append(sorted(alive.values()))
    assert seen == at_phases


def test_a_larger_step_has_larger_values_and_the_same_gradients() -> None:
    found = foreseen(_ACCUMULATED, growth=3.0)
    sizes = {event[1]: event[2] for event in found.log.events if event[0] == ALLOC}
    assert sizes == {0: 120, 1: 100, 2: 120, 3: 7, 4: 9}
    assert found.graphs[0].values[0].nbytes == 24
    assert found.graphs[0].ops[0].working_bytes == 48


def test_gradients_that_were_alive_at_the_start_do_not_grow() -> None:
    events = ((PHASE, FORWARD), (ALLOC, 8, 100), (ALLOC, 9, 40), *_MICRO_STEPS[1:])
    profile = Profile(_ACCUMULATED.graphs, _ACCUMULATED.calls, StepLog(events), step_s=1.0)
    sizes = {e[1]: e[2] for e in foreseen(profile, growth=2.0).log.events if e[0] == ALLOC}
    assert (sizes[8], sizes[9]) == (100, 80)
