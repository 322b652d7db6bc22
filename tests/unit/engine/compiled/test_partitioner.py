"""The cut of a joint graph: what is really saved, and that gradients are those of compiled code without a plan."""

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

from blocks import Computes
from compiled_blocks import IGNORED
from compiled_units import names_of, saved_tensors, values_by_name, without_code
from recollect.engine.compiled import partitioner as cuts
from recollect.engine.compiled.partitioner import Partition, PlanPartitioner
from recollect.errors import ConfigError, PlanMismatchWarning

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), IGNORED]

Words = Mapping[str, str]


@pytest.fixture(autouse=True)
def no_warnings_yet() -> None:
    cuts._told.clear()


def block() -> Computes:
    """[n, 16] -> [n, 16]."""

    def run(self: Any, rows: Tensor) -> Any:
        hidden = self.act(self.up(self.norm(rows))).sin().exp_()
        return (rows + self.down(hidden)).tanh()

    parts = {"norm": nn.LayerNorm(16), "up": nn.Linear(16, 48), "act": nn.SiLU(), "down": nn.Linear(48, 16)}
    return Computes(run, **parts)


NAMES = (
    *("norm.native_layer_norm.0", "norm.native_layer_norm.1", "norm.native_layer_norm.2", "up.addmm", "act.silu"),
    *("sin", "exp_", "down.addmm", "add", "tanh"),
)


def built(kind: Callable[[], nn.Module] = block) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def rows(seed: int = 1) -> Tensor:
    return torch.randn(12, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def run(unit: nn.Module, words: Words | None, **settings: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients, and what was saved besides parameters and inputs."""
    unit.zero_grad()
    inputs = rows()
    partitioner = None if words is None and not settings else PlanPartitioner(words, **settings)
    torch.manual_seed(7)
    output = without_code(unit.forward, partitioner)(inputs)
    saved = saved_tensors(output, [inputs, *unit.parameters(), output])
    saved = [tensor.clone() for tensor in saved]
    output.square().sum().backward()
    gradients = [inputs.grad, *(parameter.grad for parameter in unit.parameters())]
    return [gradient for gradient in gradients if gradient is not None], saved


def plan(*kept: str, names: tuple[str, ...] = NAMES) -> Words:
    return {name: "keep" if name in kept else "recompute" for name in names}


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


@pytest.mark.parametrize(
    ("kept", "saved"),
    [
        ((), set()),
        (("up.addmm",), {"up.addmm"}),
        (
            ("act.silu", "add"),
            {"act.silu"},
        ),  # The output's gradient is computed from the output, and nothing asks for the sum.
        (
            ("norm.native_layer_norm.1", "norm.native_layer_norm.2"),
            {"norm.native_layer_norm.1", "norm.native_layer_norm.2"},
        ),
        (
            NAMES,
            {"norm.native_layer_norm.0", "norm.native_layer_norm.1", "norm.native_layer_norm.2", "up.addmm", "act.silu"}
            | {"exp_"},
        ),
    ],
    ids=["nothing", "a matmul", "an activation", "statistics", "everything"],
)
def test_saved_is_what_the_plan_keeps(kept: tuple[str, ...], saved: set[str]) -> None:
    unit = built()
    expected, _ = run(unit, None)
    gradients, held = run(unit, plan(*kept))
    assert same(gradients, expected)
    assert names_of(held, values_by_name(unit, rows())) == saved
    assert len(held) == len(saved)


def test_report_says_what_is_saved() -> None:
    unit = built()
    reports: list[Partition] = []
    run(unit, {**plan("up.addmm", "tanh"), "act.gelu": "recompute"}, on_partition=reports.append)
    (report,) = reports
    assert report.kept == ("up.addmm", "tanh")
    assert report.outputs == ("tanh",)
    assert report.unnamed == ()
    assert report.missing == ("act.gelu",)
    assert 0 < len(report.inputs) <= 1 + len(list(unit.parameters()))


def test_without_actions_the_choice_is_pytorchs() -> None:
    unit = built()
    expected, held = run(unit, None)
    gradients, own = run(unit, None, on_partition=lambda report: None)
    assert same(gradients, expected)
    assert [tensor.shape for tensor in own] == [tensor.shape for tensor in held]


def test_equal_nodes_have_the_tag_of_the_first() -> None:
    """Rule 1: computed is the same twice, of which the plan keeps the second."""
    unit = Computes(lambda _, rows: (rows.sin() * rows.cos()).exp() + rows.sin().tan())
    names = ("sin", "cos", "mul", "exp", "sin#1", "tan", "add")
    expected, _ = run(unit, None)
    for kept in (("sin",), ("cos", "exp")):
        gradients, held = run(unit, plan(*kept, names=names))
        assert same(gradients, expected)
        assert len(held) == len(kept)


def test_writes_happen_once() -> None:
    """Rule 2: of a unit that writes to a buffer at the end."""

    def counts(self: Any, rows: Tensor) -> Tensor:
        hidden: Tensor = self.linear(rows).exp()
        with torch.no_grad():
            self.seen.add_(hidden.sum(0))
        return hidden.sin()

    unit = built(lambda: Computes(counts, linear=nn.Linear(16, 16), seen=torch.zeros(16)))
    expected, _ = run(unit, None)
    first = unit.get_buffer("seen").clone()
    gradients, held = run(unit, plan(names=("linear.addmm", "exp", "sin")))
    assert same(gradients, expected)
    assert torch.equal(unit.get_buffer("seen"), 2 * first)
    assert held == []


@pytest.mark.parametrize("kept", [("var_mean.0",), ("var_mean.1",), ()])
def test_results_of_an_op_share_a_decision(kept: tuple[str, ...]) -> None:
    """Rules 3 and 6: several results of one op, of which backward needs one, and a choice."""

    def choice(_: Any, rows: Tensor) -> Tensor:
        best, _ = rows.exp().topk(4)
        spread, mean = torch.var_mean(rows.tan(), dim=-1, keepdim=True)
        return best * spread.sin() + mean

    unit = Computes(choice)
    names = ("exp", "topk.0", "topk.1", "tan", "var_mean.0", "var_mean.1", "sin", "mul", "add")
    expected, _ = run(unit, None)
    gradients, held = run(unit, plan(*kept, names=names))
    assert same(gradients, expected)
    # Positions are kept whatever the plan says, and so are the values that were chosen with them, which backward needs.
    assert sum(tensor.dtype == torch.int64 for tensor in held) == 1
    # Backward asks for the variance alone, which the mean brings along.
    assert len(held) == 2 + bool(kept)


def attention(op: Callable[..., Any], *more: Any) -> Computes:
    """Rule 3: some of nine results are no tensors, or have no bytes. No kernel runs these ops on a CPU."""

    def run(_: Any, rows: Tensor) -> Any:
        heads = rows.view(1, 2, -1, 8)
        return op(heads, heads, heads, *more)[0].sin()

    return Computes(run)


class EnoughError(Exception):
    """Ends the compilation after the cut."""


def cut_of(unit: nn.Module, words: Words) -> Partition:
    reports: list[Partition] = []

    def stop(report: Partition) -> None:
        reports.append(report)
        raise EnoughError

    with pytest.raises(BackendCompilerFailed, match="EnoughError"):
        run(unit, words, on_partition=stop)
    return reports[0]


@pytest.mark.parametrize("is_kept", [False, True])
def test_results_that_are_no_tensors_keep_nothing(is_kept: bool) -> None:
    names = tuple(f"_scaled_dot_product_cudnn_attention.{result}" for result in (0, 1, 6, 7))
    words = plan("sin", *names[: 4 * is_kept], names=(*names, "sin"))
    # Eager mode makes a mask; the compiler does not, and no bytes depend on it.
    cut = cut_of(
        attention(torch.ops.aten._scaled_dot_product_cudnn_attention, None, True), {**words, "mask": "recompute"}
    )
    assert cut.kept == names[: 4 * is_kept]


def test_results_that_nothing_reads_keep_nothing() -> None:
    names = tuple(f"_scaled_dot_product_flash_attention.{result}" for result in (0, 1, 6, 7))
    cut = cut_of(attention(torch.ops.aten._scaled_dot_product_flash_attention), plan("sin", names=(*names, "sin")))
    assert cut.kept == ()


def dropped() -> Computes:
    """Rule 4: random numbers."""
    parts = {"up": nn.Linear(16, 32), "drop": nn.Dropout(0.5), "down": nn.Linear(32, 16)}
    return Computes(lambda self, rows: self.down(self.drop(self.up(rows).sin())), **parts)


DROPPED = ("up.addmm", "sin", "drop.empty_like", "drop.bernoulli_", "drop.div_", "drop.mul", "down.addmm")


def test_random_numbers_are_drawn_again_from_their_seeds() -> None:
    """Only generated code draws the same again; test_compiled_engine.py compares its gradients."""
    unit = built(dropped)
    reports: list[Partition] = []
    _, held = run(unit, plan(names=DROPPED), on_partition=reports.append)
    assert [(tensor.dtype, tensor.numel()) for tensor in held] == [(torch.int64, 1)]
    assert reports[0].missing == () and len(reports[0].unnamed) == 1
    _, held = run(unit, plan("drop.div_", names=DROPPED))
    assert [tensor.dtype for tensor in held] == [torch.bool]


@pytest.mark.parametrize("kept", [("sin",), ()])
def test_what_draws_by_itself_draws_again(kept: tuple[str, ...]) -> None:
    """Rule 5: without Inductor's own random numbers, under the state of random numbers that forward had."""
    unit = built(dropped)
    with torch._inductor.config.patch(fallback_random=True):
        expected, _ = run(unit, None)
        gradients, _ = run(unit, plan(*kept, names=DROPPED))
    assert same(gradients, expected)


def test_views_are_made_again() -> None:
    """Rule 6: views of a value, and one that is returned."""

    def viewed(_: Any, rows: Tensor) -> Tensor:
        first, second = rows.exp().chunk(2, -1)
        return (first.sin() * second.cos()).t()

    unit = Computes(viewed)
    expected, _ = run(unit, None)
    gradients, held = run(unit, plan("exp", names=("exp", "sin", "cos", "mul")))
    assert same(gradients, expected)
    assert names_of(held, values_by_name(unit, rows())) == {"exp"}


NORMS: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "batch": (lambda: nn.BatchNorm1d(16), "norm.native_batch_norm", 3),
    "batch, by cuDNN": (lambda: nn.BatchNorm1d(16), "norm.cudnn_batch_norm", 3),
    "batch, in evaluation": (lambda: nn.BatchNorm1d(16).eval(), "norm.native_batch_norm", 1),
    "group": (lambda: nn.GroupNorm(4, 16), "norm.native_group_norm", 3),
}


@pytest.mark.filterwarnings("error::recollect.errors.PlanMismatchWarning")
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_have_the_names_of_their_kernels(kind: str, is_kept: bool) -> None:
    """In evaluation there are no statistics of the batch."""
    norm, stem, num_saved = NORMS[kind]
    unit = built(lambda: Computes(lambda self, rows: self.norm(rows.exp()).sin(), norm=norm()))
    last = f"{stem}.3" if "cuDNN" in kind else "norm.empty"
    names = (f"{stem}.0", f"{stem}.1", f"{stem}.2", *([last] if "batch" in kind else []))
    reports: list[Partition] = []
    expected, _ = run(unit, None)
    words = plan("exp", *(names if is_kept else ()), names=("exp", *names, "sin"))
    gradients, _ = run(unit, words, on_partition=reports.append)
    assert same(gradients, expected)
    assert reports[0].missing == ()
    assert set(reports[0].kept) == {"exp", *(names[:num_saved] if is_kept else ())}


class Unwilling(PlanPartitioner):
    def _tagged(self, joint: Any, num_outputs: int) -> Any:
        raise RuntimeError("no")


def but_of_python(warned: pytest.WarningsRecorder) -> list[str]:
    """All that was said, but for what PyTorch says of Python 3.13.0."""
    said = [str(warning.message) for warning in warned]
    return [text for text in said if not text.startswith("Guards may run slower on Python 3.13.0.")]


def test_failure_is_pytorchs_choice_and_one_warning() -> None:
    unit = built()
    expected, _ = run(unit, None)
    partitioner = Unwilling(plan("up.addmm"))
    said = r"^cannot carry out the plan inside torch\.compile: RuntimeError: no\. What is kept is PyTorch's own choice, on "
    with pytest.warns(PlanMismatchWarning, match=said) as warned:
        for _ in range(2):
            torch._dynamo.reset()
            inputs = rows()
            without_code(unit.forward, partitioner)(inputs).square().sum().backward()
    assert inputs.grad is not None and torch.equal(inputs.grad, expected[0])
    assert len(but_of_python(warned)) == 1


def test_missing_names_are_one_warning() -> None:
    unit = built()
    said = r"^the plan does not fit the compiled code: it names 'act\.gelu' and 1 more, which is not computed there\. The step"
    with pytest.warns(PlanMismatchWarning, match=said) as warned:
        for _ in range(2):
            torch._dynamo.reset()
            run(unit, {**plan(), "act.gelu": "keep", "up.mm": "recompute"})
    assert len(but_of_python(warned)) == 1


def test_a_dropped_value_that_is_not_computed_matters_where_another_is_in_its_place() -> None:
    """Alone it takes no memory: `test_report_says_what_is_saved` has no warning."""
    unit = built()
    renamed = {"act.gelu" if name == "tanh" else name: word for name, word in plan("up.addmm").items()}
    with pytest.warns(PlanMismatchWarning, match="it names 'act.gelu', which is not computed there"):
        run(unit, renamed)


def test_new_shapes_are_cut_by_the_same_plan() -> None:
    unit = built()
    reports: list[Partition] = []
    function = without_code(unit.forward, PlanPartitioner(plan("up.addmm", "tanh"), on_partition=reports.append))
    for size in (12, 20, 28):
        inputs = torch.randn(size, 16, requires_grad=True)
        output = function(inputs)
        held = saved_tensors(output, [inputs, output, *unit.parameters()])
        assert names_of(held, values_by_name(unit, inputs)) == {"up.addmm"}
    assert len(reports) == 2  # The second is for all sizes.
    assert reports[0].kept == reports[1].kept


def test_equal_by_content() -> None:
    one, other = PlanPartitioner(plan("up.addmm")), PlanPartitioner(plan("up.addmm"))
    assert one == other and hash(one) == hash(other) and one.uuid() == other.uuid()
    assert pickle.loads(pickle.dumps(one)) == one and copy.deepcopy(one) == one
    assert pickle.dumps(one) == pickle.dumps(other)
    changed = PlanPartitioner(plan("act.silu"))
    assert one != changed and one.uuid() != changed.uuid() and pickle.dumps(one) != pickle.dumps(changed)
    assert one != PlanPartitioner(plan("up.addmm"), units=("blocks.0",))


def test_options_of_a_plan_and_of_cuda_graphs_are_refused_together() -> None:
    said = "^got compile_options='a plan', triton.cudagraphs=True: .* Leave triton.cudagraphs out of the options"
    with torch._inductor.config.patch({"triton.cudagraphs": True}), pytest.raises(ConfigError, match=said):
        PlanPartitioner({})(fx.GraphModule({}, fx.Graph()), [], num_fwd_outputs=0)


def test_a_callback_goes_past_all_caches() -> None:
    reports: list[Partition] = []
    partitioner = PlanPartitioner(plan(), on_partition=reports.append)
    assert partitioner.uuid() is None
    assert copy.deepcopy(partitioner) is partitioner
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(partitioner)


def test_checkpoint_inside_is_refused() -> None:
    unit = Computes(lambda self, rows: checkpoint(self.inner, rows, use_reentrant=False), inner=built())
    expected, _ = run(unit, None)
    with pytest.warns(PlanMismatchWarning, match=r"torch\.utils\.checkpoint is inside it, and would decide as well"):
        gradients, _ = run(unit, plan("up.addmm"))
    assert same(gradients, expected)
