"""Training steps on any device, compared to the bit where its kernels repeat themselves, else by how far they do not."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gradients import DifferentStepsError, Step, assert_same_gradients
from policies import FULL, KEEP_ALL, NOTHING_KEPT, Policy, Random
from recollect.applying import apply_policy
from recollect.engine.content import has_same_bits

T = TypeVar("T")
RecordProperty = Callable[[str, object], None]

PLANS: dict[str, Policy] = {
    "keep-all": KEEP_ALL,
    "full": FULL,
    "nothing-kept": NOTHING_KEPT,
    "random-1": Random(1),
    "random-5": Random(5),
}
FULL_ONLY: dict[str, Policy] = {"full": FULL, "nothing-kept": NOTHING_KEPT}

_MOST_RUNS = 4
# The step under a plan is one more run of the plain step's kernels on the plain step's numbers, so it should be no further
# from a plain run than plain runs are from each other; four times the largest of their six distances allows for chance.
_TIMES_FURTHER = 4


def sized(device: torch.device, cpu: T, cuda: T) -> T:
    """Return what is large enough for the kernels of a GPU there, and what is quick on a CPU here."""
    return cuda if device.type == "cuda" else cpu


def moved(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda item: item.to(device) if isinstance(item, Tensor) else item, batch)


@dataclass(frozen=True)
class PlainStep:
    """A step without a plan, as often as it takes to know whether it repeats itself."""

    runs: tuple[Step, ...]

    @property
    def varying(self) -> list[str]:
        first, *others = self.runs
        return [name for name in first if not all(has_same_bits(first[name], other[name]) for other in others)]

    def check(self, got: Mapping[str, Tensor], what: str) -> None:
        """Raise `DifferentStepsError` unless `got` is the same step, to the bit if the plain step is itself."""
        expected = self.runs[0]
        if not self.varying:
            assert_same_gradients(expected, got, what)
            return
        assert expected.keys() == got.keys(), what
        for name, tensor in expected.items():
            distance, bound = _distance(tensor, got[name]), self._bound(name)
            if not distance <= bound:
                raise DifferentStepsError(f"{what}: {name} is {distance:.3e} off, plain steps differ by {bound:.3e}")

    def _bound(self, name: str) -> float:
        runs = [run[name] for run in self.runs]
        between = max(_distance(left, right) for left, right in itertools.combinations(runs, 2))
        # A tensor that repeated itself by chance may be off by its rounding.
        eps = torch.finfo(runs[0].dtype).eps if runs[0].is_floating_point() else 0.0
        return _TIMES_FURTHER * max(between, eps * float(runs[0].double().norm()))


def _distance(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm())


def plain_step(step: Callable[[], Step], record_property: RecordProperty) -> PlainStep:
    """Run a step without a plan twice, and some more times if the two differ; note what differs in the test's report.

    Where an op has no deterministic kernel, the rest of the test goes on with the one that it has.
    """
    try:
        first = step()
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        record_property("no deterministic kernel", str(error).split(".")[0])
        torch.use_deterministic_algorithms(True, warn_only=True)
        first = step()
    plain = PlainStep((first, step()))
    if plain.varying:
        plain = PlainStep((*plain.runs, *(step() for _ in range(_MOST_RUNS - 2))))
        record_property("not the same from run to run", plain.varying)
    return plain


def check_plans(
    model: nn.Module,
    layers: Iterable[str],
    step: Callable[[], Step],
    record_property: RecordProperty,
    plans: Mapping[str, Policy] = PLANS,
) -> PlainStep:
    """Compare the steps under some plans with the plain one; return the latter."""
    plain = plain_step(step, record_property)
    for name, policy in plans.items():
        with apply_policy(model, layers, policy):
            for number in range(3):  # From the third step on, modules of which nothing is dropped run out of sight.
                plain.check(step(), f"{name}, step {number}")
    plain.check(step(), "without a plan again")
    return plain


def generator_states(device: torch.device, *generators: torch.Generator) -> Step:
    states = {"generator of the CPU": torch.get_rng_state()}
    if device.type == "cuda":
        states["generator of the GPU"] = torch.cuda.get_rng_state(device)
    return {**states, **{f"generator {index}": g.get_state() for index, g in enumerate(generators)}}


@contextmanager
def skipped_if(what: str, *phrases: str) -> Iterator[None]:
    """Skip the test, with the reason, where PyTorch refuses to run something on this device with one of these phrases."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if not any(phrase in str(error) for phrase in phrases):
            raise
        pytest.skip(f"{what}: {str(error).splitlines()[0]}")
