"""Running a user's step: batches of every form, the loss, each message, and nothing left behind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import recollect
from recollect.errors import NotYetError, RecordError
from recollect.recording.model_step import (
    Step,
    call_model,
    describe_batch,
    device_of,
    find_loss,
)
from scaled_model import ROWS, Scaled

TOKENS = torch.zeros(4, 8, dtype=torch.int64)


@dataclass
class Output:
    loss: Tensor
    logits: Tensor | None = None


GRAPH = Output(ROWS)


@pytest.mark.parametrize(
    ("batch", "positions", "keywords"),
    [
        (ROWS, (ROWS,), {}),
        ((ROWS, TOKENS), (ROWS, TOKENS), {}),
        ([ROWS, TOKENS], (ROWS, TOKENS), {}),
        ({"a": ROWS, "b": TOKENS}, (), {"a": ROWS, "b": TOKENS}),
        # Tokenizers return a `UserDict`, which is a mapping but no `dict`.
        (transformers.BatchEncoding({"a": ROWS, "b": TOKENS}), (), {"a": ROWS, "b": TOKENS}),
        (GRAPH, (GRAPH,), {}),
    ],
    ids=["tensor", "tuple", "list", "dict", "BatchEncoding", "object"],
)
def test_a_batch_is_passed_by_its_form(batch: Any, positions: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    args, kwargs = call_model(Scaled(lambda self, *args, **kwargs: (args, kwargs)), batch)
    assert [*map(id, args)] == [*map(id, positions)]
    assert {name: id(given) for name, given in kwargs.items()} == {name: id(own) for name, own in keywords.items()}


LOSS = torch.tensor(2.0)


@pytest.mark.parametrize(
    "output",
    [
        LOSS,
        {"loss": LOSS, "logits": ROWS},
        Output(LOSS),
        transformers.modeling_outputs.CausalLMOutput(loss=LOSS, logits=ROWS),
    ],
    ids=["scalar", "dict", "attribute", "ModelOutput"],
)
def test_loss_is_found(output: Any) -> None:
    assert find_loss(output, "Model") is LOSS


@pytest.mark.parametrize("shape", [[], [1], [1, 1]])
def test_loss_has_one_element(shape: list[int]) -> None:
    model = Scaled(lambda self, x: (self.weight * x).mean().reshape(shape))
    Step(model, ROWS).forward()[1].backward()
    assert model.weight.grad is not None


def test_loss_function_gets_the_output_as_it_is() -> None:
    output = object()
    seen: list[object] = []
    model = Scaled(lambda self, x: output)

    def loss_fn(given: object) -> Tensor:
        seen.append(given)
        return model.weight * 2

    assert Step(model, ROWS, loss_fn=loss_fn).forward()[1].item() == 2
    assert seen == [output]


def test_loss_function_goes_before_the_loss_of_the_output() -> None:
    model = Scaled(lambda self, x: Output(self.weight * 1, self.weight * ROWS))
    assert Step(model, ROWS, loss_fn=lambda output: output.logits.sum()).forward()[1].item() == 6


def run(function: Callable[..., Any], batch: Any = ROWS, loss_fn: Callable[[Any], Any] | None = None) -> Tensor:
    return Step(Scaled(function), batch, loss_fn=loss_fn).forward()[1]


@pytest.mark.parametrize(
    ("output", "kind", "picked"),
    [
        (None, "NoneType", r"\.\.\."),
        ({"logits": ROWS}, "dict", r"\.\.\."),
        ({"loss": None}, "dict", r"\.\.\."),
        ((ROWS, ROWS), "tuple", r"\.\.\."),
        ((ROWS, ROWS.sum()), "tuple", r"output\[1\]"),  # as nanoGPT returns them
        ([ROWS.sum(), ROWS.sum()], "list", r"\.\.\."),
        (transformers.modeling_outputs.CausalLMOutput(logits=ROWS), "CausalLMOutput", r"\.\.\."),
    ],
)
def test_no_loss(output: Any, kind: str, picked: str) -> None:
    message = (
        rf"^found no loss in the output of Scaled, a {kind}: expected `output\.loss`, output\['loss'\] or a scalar "
        rf"tensor\. Put labels into the batch, or pass loss_fn=lambda output: {picked}$"
    )
    with pytest.raises(RecordError, match=message):
        run(lambda self, x: output)


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (
            lambda weight: weight * ROWS,
            r"a tensor of shape \[3, 2\], expected a tensor with one element: reduce it, such as",
        ),
        (lambda weight: 3.0, r"a float, expected a tensor with one element\.$"),
        (lambda weight: (weight.sum(), weight), r"a tuple, expected a tensor with one element\.$"),
    ],
    ids=["tensor", "float", "tuple"],
)
@pytest.mark.parametrize("where", ["output", "loss_fn"])
def test_loss_that_is_no_scalar(loss: Callable[[Tensor], Any], got: str, where: str) -> None:
    with pytest.raises(RecordError, match=rf"^the loss of Scaled is {got}"):
        if where == "output":
            run(lambda self, x: {"loss": loss(self.weight)})
        else:
            run(lambda self, x: self.weight, loss_fn=loss)


def _without_grad(self: Scaled, x: Tensor) -> Tensor:
    with torch.no_grad():
        return self.weight * x.mean()


@pytest.mark.parametrize(
    "function", [_without_grad, lambda self, x: (self.frozen * x).sum()], ids=["no_grad", "frozen parameters"]
)
def test_loss_that_needs_no_gradient(function: Callable[..., Tensor]) -> None:
    message = (
        r"^the loss of Scaled does not require grad: no parameter that it depends on is trained, or forward ran under "
        r"torch\.no_grad\(\), as a reentrant checkpoint does whose inputs need none \(pass use_reentrant=False\)\. "
        r"Set requires_grad on what you train\.$"
    )
    with pytest.raises(RecordError, match=message):
        run(function)


def _raise(error: Exception) -> Callable[..., Any]:
    def forward(self: Scaled, *args: Any, **kwargs: Any) -> Any:
        raise error

    return forward


@pytest.mark.parametrize("kind", [TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError])
def test_model_that_rejects_the_batch(kind: type[Exception]) -> None:
    cause = kind("too long")
    message = (
        rf"^Scaled rejected the batch \(ids int64\[4, 8\], mask float32\[3, 2\]\): {kind.__name__}: '?too long'?\. A dict "
        r"is passed as keywords, a tuple or list as positions, anything else as the only argument\.$"
    )
    with pytest.raises(RecordError, match=message) as caught:
        run(_raise(cause), {"ids": TOKENS, "mask": ROWS})
    assert caught.value.__cause__ is cause


def test_loss_fn_that_fails_on_the_output() -> None:
    message = r"^loss_fn failed on the output of Scaled, its only argument: TypeError: .*'target'\. If it needs targets, write "
    with pytest.raises(RecordError, match=message):
        run(lambda self, x: self.weight, loss_fn=nn.CrossEntropyLoss())
    with pytest.raises(
        RecordError, match="loss_fn: got 'sum', expected a function from the model's output to a scalar"
    ):
        Step(Scaled(torch.sum), ROWS, loss_fn="sum").check()  # type: ignore[arg-type]


def test_words_and_steps_that_record_nothing() -> None:
    with pytest.raises(RecordError, match=r"gradients: got 'none', expected 'held' or 'freed' or 'accumulated'\."):
        Step(Scaled(torch.sum), ROWS, gradients="none").check()  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(
        RecordError, match=r"^the step of Sequential ran no backward, expected loss\.backward\(\) in it\.$"
    ):
        recollect.record(model, step=lambda: model(ROWS))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RecordError("of an inner model"), OSError("disk")])
def test_other_errors_pass_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        run(_raise(error))
    assert caught.value is error


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (TOKENS, "int64[4, 8]"),
        (torch.tensor(1.0), "float32[]"),
        ((ROWS.bfloat16(), TOKENS), "bfloat16[3, 2], int64[4, 8]"),
        ({"tokens": TOKENS, "pair": [ROWS, None]}, "tokens int64[4, 8], pair float32[3, 2], NoneType"),
        ({}, ""),
        ([[1] * 512, TOKENS], "int (512 times), int64[4, 8]"),
        (
            (*range(3), *(torch.zeros(size) for size in range(20))),
            "int (3 times), float32[0], float32[1], float32[2], float32[3], "
            "float32[4], float32[5], float32[6], and 13 more",
        ),
        (Output(LOSS), "Output"),
    ],
)
def test_batch_in_words(batch: Any, words: str) -> None:
    assert describe_batch(batch) == words


def test_device_is_that_of_the_first_real_tensor() -> None:
    meta = nn.Linear(2, 2, device="meta")
    assert device_of(nn.Linear(2, 2), ROWS) == torch.device("cpu")
    assert device_of(meta, {"x": [ROWS]}) == torch.device("cpu")
    assert device_of(nn.ReLU(), None) == torch.device("cpu")
    assert device_of(meta, ROWS.to("meta")) == torch.device("cpu")


def on_cuda(*indices: int) -> nn.ParameterList:
    with FakeTensorMode():
        return nn.ParameterList(torch.empty(2, device=f"cuda:{index}") for index in indices)


def test_device_is_the_cuda_device_with_parameters() -> None:
    model = nn.Sequential(nn.Embedding(4, 2), on_cuda(1))
    assert device_of(model, ROWS) == torch.device("cuda:1")


@pytest.mark.parametrize("model", [on_cuda(0, 1), nn.DataParallel(nn.Linear(2, 2))], ids=["layers on two", "replicas"])
def test_several_devices_in_one_process_are_refused(model: nn.Module) -> None:
    if isinstance(model, nn.DataParallel):
        model.device_ids = [0, 1]
    with pytest.raises(
        NotYetError, match=r"'on cuda:0 and cuda:1': not yet: a budget .* Run one process for each device"
    ):
        device_of(model, None)


def test_devices_without_a_meter_are_refused() -> None:
    model = nn.ParameterList([FakeTensor(FakeTensorMode(), torch.empty(2, device="meta"), torch.device("mps"))])
    with pytest.raises(NotYetError, match=r"'on mps': not yet: a clock and a meter .* Run on CUDA or the CPU"):
        device_of(model, None)


def test_shards_on_the_cpu_are_refused() -> None:
    whole, mesh = torch.ones(2, 2), DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(whole.shape, whole.stride(), whole.dtype))
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(DTensor(whole, spec, requires_grad=True))
    with pytest.raises(NotYetError, match=r"on cuda, with sharded parameters on the CPU .* without offload_policy"):
        device_of(model, None)
