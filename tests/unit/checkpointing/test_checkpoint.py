"""`checkpoint` and `checkpoint_sequential`: how they are called, what they keep, and what a policy says.

That any function's gradients are those of the plain call is shown for all units, in `tests/contracts`.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import recollect
from blocks import Computes
from recollect.checkpointing.op_policy import _offload_from
from recollect.errors import ConfigError, MutatedValueError, NotYetError
from watch import Watch

torch.manual_seed(0)
LAYER = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
WEIGHT = torch.randn(8, 8, requires_grad=True)


def composite(x: Tensor) -> Tensor:
    return (LAYER(x).tanh() * x.sigmoid() + x).softmax(-1)


def with_dropout(x: Tensor) -> Tensor:
    return nn.functional.dropout(LAYER(nn.functional.dropout(x, 0.5)).tanh(), 0.3) + torch.rand_like(x)


def nested(x: Tensor) -> Tensor:
    inner = recollect.checkpoint(composite, x)
    return recollect.checkpoint(with_dropout, inner.exp()).sin()


def nested_in_pytorchs(x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(nested, x.exp(), use_reentrant=False).cos()


@contextmanager
def fresh() -> Iterator[Tensor]:
    """An input of three rows; parameters without gradients, and the generator as at the start."""
    parameters = [*LAYER.parameters(), WEIGHT]
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(1)
    x = torch.randn(3, 8, requires_grad=True)
    torch.manual_seed(2)
    yield x
    for parameter in parameters:
        parameter.grad = None


def step(run: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor], object] | None = None) -> list[Any]:
    """Everything that a step leaves behind: output, gradients, and the next random number."""
    with fresh() as x:
        output = run(x)
        (backward or (lambda output, x: output.square().sum().backward()))(output, x)
        gradients = [p.grad for p in (x, *LAYER.parameters(), WEIGHT)]
        kept = [None if g is None else g.clone() for g in gradients]
        return [output.detach().clone(), *kept, torch.rand(1)]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) is (other is None)
        assert one is None or torch.equal(one, other)


def of_gradients(output: Tensor, x: Tensor) -> None:
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    gradient.square().sum().backward()


@pytest.mark.parametrize("function", [composite, with_dropout, nested, nested_in_pytorchs], ids=lambda f: f.__name__)
def test_first_and_second_gradients(function: Any) -> None:
    for backward in (None, of_gradients):
        assert_equal(step(lambda x: recollect.checkpoint(function, x), backward), step(function, backward))


def test_values_are_dropped_and_made_again_only_when_asked_for() -> None:
    large = torch.randn(1000, requires_grad=True)
    unused = recollect.measure_peak(lambda: recollect.checkpoint(chain, large), device="cpu", baseline_bytes=0)
    assert unused.end_bytes == large.nbytes  # the output
    calls = []
    output = recollect.checkpoint(lambda x: (calls.append(1), chain(x))[1], large)
    output.sum().backward()
    assert calls == [1], "the function runs once"


def chain(x: Tensor) -> Tensor:
    return x.sin().exp().sin().exp().sin()


def test_under_a_transform_it_is_a_plain_call() -> None:
    with fresh() as x:
        rows = x.detach()
    gradient = torch.func.grad(lambda row: recollect.checkpoint(chain, row).sum())
    expected = torch.func.grad(lambda row: chain(row).sum())
    assert torch.equal(gradient(rows), expected(rows))
    assert torch.equal(torch.vmap(gradient)(rows), torch.vmap(expected)(rows))


def test_threads_do_not_disturb_each_other() -> None:
    expected = [step(lambda x, n=n: composite(x * n)) for n in range(4)]
    found: dict[int, Tensor] = {}

    def work(n: int) -> None:
        torch_input = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        output = recollect.checkpoint(lambda x: composite(x * n), torch_input)
        (found[n],) = torch.autograd.grad(output.square().sum(), torch_input)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_equal([found[n] for n in range(4)], [steps[1] for steps in expected])


def test_an_error_in_the_function_leaves_nothing_behind() -> None:
    def fails(x: Tensor) -> Tensor:
        x.exp()
        raise KeyError("inside")

    with fresh() as x, pytest.raises(KeyError, match="inside"):
        recollect.checkpoint(fails, x)
    test_values_are_dropped_and_made_again_only_when_asked_for()


def test_a_write_to_the_input_is_an_error_by_name() -> None:
    with fresh() as x:
        hidden = x.exp()
        output = recollect.checkpoint(composite, hidden)
        with torch.no_grad():
            hidden.mul_(2)
        with pytest.raises(MutatedValueError, match="in composite, was changed in place 1 time"):
            output.sum().backward()


def written_unseen(x: Tensor) -> Tensor:
    hidden = x.exp()
    hidden.detach().numpy()[...] *= 2
    return hidden.sin()


def module_of(function: Callable[[Tensor], Tensor]) -> Computes:
    return Computes(lambda _, x: function(x))


@pytest.mark.parametrize("named_alike", [functools.partial, module_of])
def test_each_of_several_functions_of_one_name_is_watched_for_unseen_writes(named_alike: Any) -> None:
    with fresh() as x:
        recollect.checkpoint(named_alike(composite), x)
        with pytest.raises(
            MutatedValueError, match="used by exp in (partial|Computes), was changed in place in forward"
        ):
            recollect.checkpoint(named_alike(written_unseen), x)


def calls(checkpoint: Callable[..., Tensor]) -> Computes:
    """A layer that checkpoints a part of itself."""
    part = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    return Computes(lambda self, x: checkpoint(self.part, x.cos()).exp().sin() + x, part=part)


@pytest.mark.parametrize("has_policy", [False, True])
def test_in_a_planned_unit_the_plan_decides(has_policy: bool) -> None:
    options = {"context_fn": selective([torch.ops.aten.gelu.default])} if has_policy else {}
    model = nn.Sequential(*(calls(functools.partial(recollect.checkpoint, **options)) for _ in range(3)))
    batch = torch.randn(64, 16)
    profile = recollect.record(model, batch, loss_fn=torch.sum)
    full = recollect.classic_plan(profile, "full")
    report = recollect.verify(model, batch, full, loss_fn=torch.sum, time=False)
    assert report.equal
    assert report.plan_peak_bytes == pytest.approx(full.predicted_peak_bytes, abs=1024)
    # Units of which everything is kept are on no tape: there it works as always.
    partly = recollect.plan(profile, "80%")
    report = recollect.verify(model, batch, partly, loss_fn=torch.sum, time=False)
    assert report.equal
    assert partly.predicted_peak_bytes is not None
    assert report.plan_peak_bytes < partly.predicted_peak_bytes


TAKES_RESPECT = "respect_saved_tensors_hooks" in inspect.signature(torch.utils.checkpoint.checkpoint).parameters


@pytest.mark.filterwarnings("ignore:recollect. hooks for saved tensors")
@pytest.mark.parametrize("respects", [None, False, True])
@pytest.mark.parametrize("around", [nullcontext, torch.autograd.graph.save_on_cpu], ids=["no hooks", "save_on_cpu"])
def test_pytorchs_selective_checkpoints_in_planned_units_stay_exact(around: Any, respects: bool | None) -> None:
    """Of hooks it sees the user's alone: a plan's are no reason for its warning (an error here), nor to route what it saves."""
    if respects is not None and not TAKES_RESPECT:
        pytest.skip("respect_saved_tensors_hooks is new in torch 2.15")
    if respects is None and around is not nullcontext and TAKES_RESPECT:
        pytest.skip("without a plan torch 2.15 warns here, too")
    options: dict[str, Any] = {} if respects is None else {"respect_saved_tensors_hooks": respects}
    options |= {"use_reentrant": False, "context_fn": selective(saves_products)}
    call = functools.partial(torch.utils.checkpoint.checkpoint, **options)
    model = nn.Sequential(*(calls(call) for _ in range(3)))
    batch = torch.randn(64, 16)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        with around():
            loss = model(batch).square().sum()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients()
    full = recollect.classic_plan(recollect.record(model, batch, loss_fn=torch.sum), "full")
    with recollect.apply(model, full):
        assert all(map(torch.equal, gradients(), expected))


def test_what_a_policy_saves_is_not_sent_through_hooks_around_it() -> None:
    with (
        fresh() as x,
        torch.autograd.graph.save_on_cpu(),
        pytest.raises(NotYetError, match="respect_saved_tensors_hooks=True: not"),
    ):
        recollect.checkpoint(composite, x, context_fn=selective(saves_products), respect_saved_tensors_hooks=True)


@pytest.mark.parametrize("respects", [None, False, True])
def test_without_hooks_around_it_nothing_is_to_be_respected(respects: bool | None) -> None:
    run = functools.partial(
        recollect.checkpoint, composite, context_fn=selective(saves_products), respect_saved_tensors_hooks=respects
    )
    assert_equal(step(run), step(composite))


def test_as_a_decorator() -> None:
    decorated = recollect.checkpoint(use_reentrant=False, preserve_rng_state=False)(composite)
    assert decorated.__name__ == "composite"
    assert_equal(step(decorated), step(composite))


# What is handed to PyTorch's own implementation


def test_reentrant_is_pytorchs_own() -> None:
    assert_equal(step(lambda x: recollect.checkpoint(with_dropout, x, use_reentrant=True)), step(with_dropout))
    with fresh() as x:
        output = recollect.checkpoint(composite, x, use_reentrant=True)
        with pytest.raises(RuntimeError, match="use_reentrant=True"):
            torch.autograd.grad(output.sum(), x)
        with pytest.raises(ValueError, match="keyword arguments"):
            recollect.checkpoint(composite, use_reentrant=True, x=x)
        with pytest.raises(ValueError, match="context_fn"):
            recollect.checkpoint(composite, x, use_reentrant=True, context_fn=lambda: (nullcontext(), nullcontext()))


def test_contexts_of_ones_own_get_their_second_run() -> None:
    seen = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        seen.append(name)
        yield

    def run(x: Tensor) -> Tensor:
        output: Tensor = recollect.checkpoint(with_dropout, x, context_fn=lambda: (noted("first"), noted("second")))
        return output

    assert_equal(step(run), step(with_dropout))
    assert seen == ["first", "second"]


def test_compiled_code_gets_pytorchs_own() -> None:
    def run(x: Tensor) -> Tensor:
        return recollect.checkpoint(composite, x).sin()

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    with fresh() as x:
        (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
        (expected,) = torch.autograd.grad(composite(x).sin().sum(), x)
    torch.testing.assert_close(gradient, expected)  # AOTAutograd decomposes ops, and rounds differently.


# Policies


def saves_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy: Any) -> Callable[[], Any]:
    return functools.partial(create_selective_checkpoint_contexts, policy)


def computed_again(function: Callable[[Tensor], Tensor], context_fn: Any) -> dict[str, int]:
    """How often ops run in backward that ran in forward, by name."""
    with fresh() as x, Watch() as watch:
        output = recollect.checkpoint(function, x, context_fn=context_fn)
        forward = watch.ops
        output.sum().backward()
    return {name: again for name, count in forward.items() if (again := watch.ops[name] - count)}


def test_what_a_policy_saves_is_not_computed_again() -> None:
    def function(x: Tensor) -> Tensor:
        return LAYER(x).tanh().exp()

    assert computed_again(function, selective([torch.ops.aten.tanh.default]))["gelu"] == 1
    found = computed_again(function, selective(saves_products))
    assert "addmm" not in found and found["gelu"] == found["tanh"] == 1
    found = computed_again(function, selective([torch.ops.aten.gelu.default]))
    assert "gelu" not in found and found["addmm"] == 2
    # A view that is saved is saved with what it looks at.
    transposed = computed_again(lambda x: x.exp().t().sin().cos(), selective([torch.ops.aten.t.default]))
    assert "exp" not in transposed and "t" in transposed


def test_a_policy_sees_the_result_and_may_count_and_answer_with_bools() -> None:
    seen: list[Any] = []

    def context_fn() -> Any:
        count = 0

        def every_second_product(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            nonlocal count
            seen.append(context.op_output)
            count += op is torch.ops.aten.addmm.default
            return op is torch.ops.aten.addmm.default and count % 2 == 0

        return create_selective_checkpoint_contexts(every_second_product)

    for _ in range(2):
        assert computed_again(lambda x: LAYER(x).tanh().exp(), context_fn)["addmm"] == 1
    assert all(isinstance(output, Tensor) for output in seen)


@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD])
def test_a_policy_that_offloads_does(answer: CheckpointPolicy) -> None:
    """What it offloads is in host memory between forward and backward, and computed once; PyTorch computes it again."""
    mm = torch.ops.aten.mm.default
    products = selective(lambda context, op, *args, **kwargs: answer if op is mm else CheckpointPolicy.PREFER_RECOMPUTE)
    weight = torch.randn(64, 64, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).sigmoid() @ weight

    def two(run: Any) -> Any:
        x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        return x, run(block, run(block, x))

    pool = _offload_from(torch.device("cpu")).host.pool
    x, output = two(functools.partial(recollect.checkpoint, context_fn=products))
    assert pool.taken_bytes == 4 * x.nbytes
    with Watch() as watch:
        output.sum().backward()
    assert watch.computing_ops()["mm"] == 2 * 4  # Two gradients of each of two products.
    assert pool.taken_bytes == 0
    plain, expected = two(lambda function, x: function(x))
    found = weight.grad
    weight.grad = None
    expected.sum().backward()
    assert torch.equal(output, expected) and torch.equal(x.grad, plain.grad) and torch.equal(found, weight.grad)


def test_a_policy_that_says_nothing_is_refused() -> None:
    with fresh() as x, pytest.raises(ConfigError, match="the policy returned no CheckpointPolicy"):
        recollect.checkpoint(composite, x, context_fn=selective(lambda context, op, *args, **kwargs: None))


def test_other_mistakes() -> None:
    with fresh() as x:
        with pytest.raises(
            ConfigError, match="determinism_check='strict': there is no such check. Set it to 'default' or 'none'"
        ):
            recollect.checkpoint(composite, x, determinism_check="strict")
        with pytest.raises(ConfigError, match="trace for debugging"):
            recollect.checkpoint(composite, x, debug=True, context_fn=selective(saves_products))
        recollect.checkpoint(
            composite, x, debug=True, determinism_check="none", early_stop=False, preserve_rng_state=False
        )


# Sequences


@pytest.mark.parametrize("segments", [1, 2, 3, 5])
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_sequences(segments: int, use_reentrant: bool | None) -> None:
    parts = nn.Sequential(LAYER, nn.Tanh(), nn.Dropout(0.5), LAYER, nn.Sigmoid())
    for functions in (parts, list(parts)):
        run = functools.partial(recollect.checkpoint_sequential, functions, segments, use_reentrant=use_reentrant)
        assert_equal(step(lambda x, run=run: run(input=x)), step(parts))


@pytest.mark.parametrize("segments", [0, 6])
def test_a_number_of_segments_that_does_not_fit(segments: int) -> None:
    with pytest.raises(ConfigError, match=f"segments={segments}: there are 5 functions to divide. Set it to 1 to 5"):
        recollect.checkpoint_sequential([torch.sin] * 5, segments, torch.ones(1))
