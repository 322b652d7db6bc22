"""What has gone wrong where others offload activations; each test names the report of it.

Further ones are elsewhere: a wait on the wrong stream (torchtitan#2581) is rules 1 and 3 in `test_offload_rules.py`, and a
first step that brings back what is not out yet (Megatron-LM#7398) is rule 8; a tensor that is written to after its snapshot
(axolotl), and one that is freed while it is copied (torchrec#4231), are in `test_offload_faults.py`. What is read again in the
replay of a CUDA graph (ROCm TransformerEngine#721) does not exist here.
"""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import recollect
from blocks import Computes
from gradients import assert_same_gradients, gradients
from offload_programs import Sizes, Trial, carried_by, offload_of, random_plan
from recollect.measuring.meter import storage_bytes
from recollect.plans.plan import Plan
from recollect.plans.trip import Trip
from slow_copies import SlowCarrier

ROWS, WIDTH = 32, 16
# A step copies some 100 KB each way.
SLOW = 2e6


@pytest.fixture
def trial() -> Trial:
    return Trial(ROWS, WIDTH, 4, 0.1)


def test_a_slot_is_not_written_to_while_it_is_read(trial: Trial) -> None:
    """Megatron-LM, fine-grained offloading: a host buffer was free again as soon as the copy back had been asked for."""
    plain, other = trial.gradients(trial.data), trial.gradients(trial.data + 1)
    found = []

    def run_another(*_: object) -> None:
        handle.remove()
        with torch.enable_grad():
            found.append(trial.gradients(trial.data + 1))

    handle = trial.model.blocks[-1].register_full_backward_hook(run_another)
    with (
        carried_by(lambda: SlowCarrier(None, SLOW)),
        recollect.apply(trial.model, trial.plan(Trip(1, 4))),
    ):
        assert all(map(torch.equal, plain, trial.gradients(trial.data)))
    assert all(map(torch.equal, other, found[0]))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_several_micro_batches_in_flight(trial: Trial, order: tuple[int, ...]) -> None:
    """Megatron-LM#6783: what brings copies back went on too early where there were several micro-batches."""
    batches = [trial.data + number for number in range(3)]
    plain = [trial.gradients(batch) for batch in batches]
    with recollect.apply(trial.model, trial.plan(Trip(2, 1))):
        losses = []
        for batch in batches:
            torch.manual_seed(1)
            losses.append(trial.model(batch).sum())
        for number in order:
            found = torch.autograd.grad(losses[number], list(trial.model.parameters()))
            assert all(map(torch.equal, plain[number], found))


def test_a_graph_that_is_kept_after_the_backward_of_a_different_one(trial: Trial) -> None:
    """The first backward brings back for good what the second one asks for, and the third one again."""

    def step() -> list[Tensor]:
        trial.model.zero_grad()
        torch.manual_seed(1)
        first, second = trial.model(trial.data).sum(), trial.model(trial.data + 1).sum()
        first.backward()
        second.backward(retain_graph=True)
        second.backward()
        return [parameter.grad.clone() for parameter in trial.model.parameters() if parameter.grad is not None]

    plain = step()
    with recollect.apply(trial.model, trial.plan(Trip(1, 1))) as applied:
        assert all(map(torch.equal, plain, step()))
        assert offload_of(applied).host.pool.taken_bytes == 0


def test_forward_passes_without_gradients_count_for_nothing(trial: Trial) -> None:
    """NeMo-RL#2279: a pass that only goes forward used up what was meant for the first step."""
    plain = trial.gradients(trial.data)
    with recollect.apply(trial.model, trial.plan()) as applied:
        host = offload_of(applied).host
        for _ in range(2):
            with torch.no_grad():
                trial.model(trial.data)
            assert host.pool.taken_bytes == 0
            assert all(map(torch.equal, plain, trial.gradients(trial.data)))
        assert host.num_missed == 0


@pytest.mark.parametrize("seed", range(3))
def test_what_is_recomputed_from_what_is_offloaded(trial: Trial, seed: int) -> None:
    """Megatron-LM#7044: recompute and offloading both freed one storage. Here with other data in each step."""
    with recollect.apply(trial.model, random_plan(trial.names, seed)) as applied:
        for number in range(3):
            data = trial.data * (number + 1)
            found = trial.gradients(data)
            with applied.suspended():
                assert all(map(torch.equal, trial.gradients(data), found))


def product(then: Callable[[Tensor], Tensor]) -> nn.Module:
    """A unit that multiplies, and then does something with the product. [n, d] -> [n, d]."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    return nn.Sequential(Computes(lambda self, hidden: then(hidden @ self.weight), weight=weight))


@pytest.mark.parametrize(
    "then",
    [
        pytest.param(
            lambda hidden: hidden @ (hidden.t() @ hidden), id="ms-swift#10157, TRL#6241: a transposed view, too"
        ),
        pytest.param(lambda hidden: hidden[:, ::2].sin(), id="DeepSpeed#8387: only a view is saved"),
    ],
)
def test_views_of_one_storage_share_its_copy(then: Callable[[Tensor], Tensor]) -> None:
    model, data = product(then), torch.randn(ROWS, WIDTH)
    plain = gradients(model, data, torch.sum)
    carrier = Sizes()
    actions = {"mm": "offload", "mm#1": "keep", "mm#2": "keep", "sin": "keep"}
    with carried_by(lambda: carrier), recollect.apply(model, Plan({"0": recollect.UnitPlan(actions)})):
        assert_same_gradients(plain, gradients(model, data, torch.sum))
    assert carrier.sizes == [ROWS * WIDTH * 4]


def test_more_of_a_kind_than_the_plan_names_go_with_the_next_unit() -> None:
    """As in a loop over experts that got tokens."""
    model, data = product(lambda hidden: hidden @ hidden.t() @ hidden), torch.randn(ROWS, WIDTH)
    plain = gradients(model, data, torch.sum)
    carrier = Sizes()
    unit = recollect.UnitPlan({"mm": "offload"}, trips={"mm": Trip(2, 2)})
    with carried_by(lambda: carrier), recollect.apply(model, Plan({"0": unit})):
        assert_same_gradients(plain, gradients(model, data, torch.sum))
    assert carrier.sizes == [ROWS * WIDTH * 4, ROWS * ROWS * 4, ROWS * WIDTH * 4]


def test_nothing_of_a_step_is_there_in_the_next(trial: Trial) -> None:
    """TRL#5700: between 0.6 and 5 GB stayed."""

    def held() -> int:
        gc.collect()
        return storage_bytes(thing for thing in gc.get_objects() if type(thing) is Tensor)

    with recollect.apply(trial.model, trial.plan(Trip(2, 1), 1 << 20)):
        trial.gradients(trial.data)
        before = held()
        for _ in range(3):
            trial.gradients(trial.data)
        assert held() == before
