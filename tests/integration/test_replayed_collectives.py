"""Collectives that run again: what full recompute then keeps, against Megatron's formula, and how often they run."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import recollect
from blocks import Computes
from gradients import assert_same_gradients
from rank_programs import replayed_collectives, run_on_ranks
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import simulate
from watch import Watch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs PyTorch with torch.distributed")

# Of the parallel group, the sequence, the batch and the hidden layer; multiplications of these must not look alike.
T, S, B, H, HEADS = 4, 32, 3, 24, 4
ELEMENT_BYTES = 4


@pytest.fixture
def group() -> Iterator[None]:
    """The first of `T` ranks; the fake group has nobody to wait for."""
    dist.init_process_group("fake", rank=0, world_size=T)
    yield
    dist.destroy_process_group()


def layer() -> Computes:
    """A layer of the formula. [b, s, h] -> [b, s, h], or the same with s / t under sequence parallelism."""

    def attend(self: Any, x: Tensor) -> Any:
        """Causal attention over this rank's heads."""
        q, k, v = (part(x).unflatten(-1, (-1, H // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def run(self: Any, x: Tensor) -> Any:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))

    norms = {f"norm_{number}": nn.LayerNorm(H, bias=False) for number in (1, 2)}
    attention = Computes(attend, **{name: nn.Linear(H, H, bias=False) for name in "qkvo"})
    products = {"up": nn.Linear(H, 4 * H, bias=False), "down": nn.Linear(4 * H, H, bias=False)}
    mlp = Computes(lambda self, x: self.down(nn.functional.gelu(self.up(x))), **products)
    return Computes(run, **norms, attention=attention, mlp=mlp)


def layers(number: int, *, sequence: bool) -> nn.Sequential:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = nn.Sequential(*(layer() for _ in range(number)))
    between = Shard(1) if sequence else Replicate()
    styles: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": RowwiseParallel(output_layouts=between),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        styles |= {"norm_1": SequenceParallel(), "norm_2": SequenceParallel(), "attention": whole, "mlp": whole}
    for one in model:
        parallelize_module(one, init_device_mesh("cpu", (T,)), styles)
    return model


def data(*, sequence: bool) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(B, S // T if sequence else S, H, requires_grad=True)


def full_plan(model: nn.Module, x: Tensor, collectives: Any) -> tuple[recollect.Profile, recollect.Plan]:
    profile = recollect.record(model, x, loss_fn=torch.sum, collectives=collectives)
    return profile, recollect.classic_plan(profile, "full")


def kept_bytes(number: int, *, sequence: bool, collectives: Any) -> tuple[int, int]:
    """Bytes that full recompute of some layers keeps for backward: as predicted, and as counted."""
    model, x = layers(number, sequence=sequence), data(sequence=sequence)
    profile, plan = full_plan(model, x, collectives)
    predicted = simulate(profile, decide(profile, plan)).kept_bytes
    with recollect.apply(model, plan), Watch() as watch:
        output = model(x)
        counted = watch.live_bytes()
    del output
    return predicted, counted


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("sequence", "collectives", "values"),
    [
        # Korthikanti et al. 2022, table 2: 2 sbh bytes in half precision, and 2 sbh / t with sequence parallelism.
        (False, "replay", S * B * H),
        (True, "replay", S * B * H // T),
        # What collectives return stays: that of attention, which the second norm reads; and with sequence parallelism
        # the gathered inputs of both matrices, too.
        (False, "keep", 2 * S * B * H),
        (True, "keep", 2 * S * B * H // T + 2 * S * B * H),
    ],
)
def test_full_recompute_keeps_what_megatron_keeps(sequence: bool, collectives: str, values: int) -> None:
    two, three = (kept_bytes(number, sequence=sequence, collectives=collectives) for number in (2, 3))
    assert three[0] - two[0] == values * ELEMENT_BYTES
    assert three[1] - two[1] == values * ELEMENT_BYTES


@pytest.mark.usefixtures("group")
def test_collectives_are_counted_as_predicted() -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    def counted(model: nn.Module, x: Tensor) -> Counter[str]:
        with CommDebugMode() as mode:
            model(x).sum().backward()
        return Counter({str(op).rpartition(".")[2]: count for op, count in mode.get_comm_counts().items()})

    model, x = layers(3, sequence=True), data(sequence=True)
    profile, plan = full_plan(model, x, "replay")
    plain = counted(model, x)
    with recollect.apply(model, plan):
        under_plan = counted(model, x)
    replays = Counter[str]()
    for usage in recollect.layer_usage(profile, plan):
        replays.update(usage.replayed_collectives)
    assert replays == {"all_gather_into_tensor": 6, "reduce_scatter_tensor": 3}
    assert under_plan - plain == replays
    with recollect.apply(model, full_plan(model, x, "keep")[1]):
        assert counted(model, x) == plain


@pytest.mark.usefixtures("group")
def test_megatrons_settings_gather_again_whatever_they_recompute() -> None:
    """With none, too: LinearWithGradAccumulationAndAsyncCommunication saves a part of its input (Megatron-LM at d98e8a64)."""
    model, x = layers(3, sequence=True), data(sequence=True).detach()
    profile = recollect.record(model, x, loss_fn=torch.sum, collectives="replay")
    plan = recollect.megatron_plan(profile, recollect.RecomputeConfig())
    report = recollect.verify(model, x, plan, loss_fn=torch.sum, compare="step", time=False)
    assert report.equal
    assert 0 <= (plan.predicted_peak_bytes or 0) - report.plan_peak_bytes <= 1024
    for usage in recollect.layer_usage(profile, plan):
        assert usage.replayed_collectives == {"all_gather_into_tensor": 2}


def exchange() -> Computes:
    """A layer that calls functional collectives itself, as expert and context parallelism do. [n, h] -> [n, h]."""

    def run(self: Any, x: Tensor) -> Any:
        from torch.distributed import _functional_collectives as functional

        rows = [len(x) // T] * T
        sent = functional.all_to_all_single(self.up(x).tanh(), rows, rows, dist.group.WORLD)
        back = functional.all_to_all_single(self.down(sent).tanh(), rows, rows, dist.group.WORLD)
        gathered = functional.all_gather_single(back.exp(), 0, dist.group.WORLD)
        return functional.reduce_scatter_single(gathered.sin(), "sum", 0, dist.group.WORLD).cos()

    return Computes(run, up=nn.Linear(H, H), down=nn.Linear(H, H))


@pytest.mark.usefixtures("group")
def test_collectives_that_a_model_calls_run_again() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(exchange() for _ in range(3))), torch.randn(8, H)
    profile, plan = full_plan(model, x, "replay")
    report = recollect.verify(model, x, plan, loss_fn=torch.sum, compare="step", time=False)
    assert report.equal
    assert 0 <= (plan.predicted_peak_bytes or 0) - report.plan_peak_bytes <= 1024
    usage = recollect.layer_usage(profile, plan)[1]
    assert usage.replayed_collectives == {
        "all_to_all_single": 2,
        "all_gather_into_tensor": 1,
        "reduce_scatter_tensor": 1,
    }
    assert usage.kept == (("cos", 8 * H * ELEMENT_BYTES),)


@pytest.mark.usefixtures("group")
def test_a_plan_that_does_not_name_a_collective_keeps_it() -> None:
    """However many others of its kind it names: another rank may run fewer."""
    torch.manual_seed(0)
    model, x = nn.Sequential(exchange(), exchange()), torch.randn(8, H)
    _, plan = full_plan(model, x, "replay")
    lean = {
        path: recollect.UnitPlan(
            {name: action for name, action in unit.actions.items() if not name.endswith("all_to_all_single#1")}
        )
        for path, unit in plan.units.items()
    }
    with recollect.apply(model, recollect.Plan(lean)), Watch() as watch:
        model(x).sum().backward()
    # Two in forward and two in backward, and the first one again.
    assert watch.ops["_c10d_functional::all_to_all_single"] == 2 * (2 + 2 + 1)


def test_an_unknown_word_is_an_error() -> None:
    with pytest.raises(recollect.errors.RecordError, match="collectives: got 'drop', expected 'keep' or 'replay'"):
        recollect.record(nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 2), collectives="drop")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes saw over gloo."""
    if not dist.is_gloo_available():
        pytest.skip("needs PyTorch with the gloo backend")
    return run_on_ranks(replayed_collectives, tmp_path_factory.mktemp("replayed"))


def test_ranks_with_one_plan_run_collectives_again(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        plain, replayed = rank["plain"], rank["one plan"]
        assert_same_gradients(plain["gradients"], replayed["gradients"])
        assert replayed["all-reduces"] > plain["all-reduces"]


@pytest.mark.parametrize("name", ["two plans", "one keeps collectives", "one has nothing to do"])
def test_ranks_with_two_plans_all_say_so_before_they_wait_for_each_other(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    first, second = (rank[name] for rank in ranks)
    expected = r"cannot run the plan: the ranks of one group have .* \(\w{12} in rank 0, \w{12} in rank 1\), .* Make"
    assert re.match(expected, first["error"]), first["error"]
    assert first["error"] == second["error"]


def test_ranks_that_keep_collectives_may_have_two_plans(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_same_gradients(rank["plain"]["gradients"], rank["both keep collectives"]["gradients"])
