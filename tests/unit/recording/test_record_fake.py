"""Recording on fake tensors: the same predictions, no memory, no time, and a clear word where it cannot be done."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

import recollect
from blocks import Computes, mean_square
from predictions import classic_peaks
from recollect.costs.hardware_table import HARDWARE
from recollect.errors import ConfigWarning, HardwareError, RecordError
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.profile.profile import Profile
from small_llama import SMALL, batch_of, graph_at, llama
from zoo import ZOO

GIB = 2**30


@pytest.mark.parametrize("optimizer", [False, True])
def test_fake_recording_predicts_what_a_real_one_predicts(optimizer: bool) -> None:
    model, batch = llama(), batch_of()
    with torch.device("meta"):
        meta = GPTModel(SMALL)
    adamw = (lambda m: torch.optim.AdamW(m.parameters())) if optimizer else lambda m: None
    real = recollect.record(model, batch, optimizer=adamw(model))
    fake = recollect.record(meta, batch, optimizer=adamw(meta), fake=True)
    on_meta = recollect.record(meta, {k: v.to("meta") for k, v in batch.items()}, optimizer=adamw(meta), fake=True)
    assert dict(fake.persistent) == dict(on_meta.persistent) == dict(real.persistent)
    assert classic_peaks(fake) == pytest.approx(classic_peaks(real), rel=0.001)
    assert classic_peaks(on_meta) == classic_peaks(fake)
    assert (fake.fake, fake.calibration_bytes) == (True, 0)
    assert [v.name for v in graph_at(fake, "decoder.layers.1").values] == [
        v.name for v in graph_at(real, "decoder.layers.1").values
    ]
    assert [v.saved for v in graph_at(fake, "decoder.layers.1").values] == [
        v.saved for v in graph_at(real, "decoder.layers.1").values
    ]


def test_the_link_to_the_host_is_that_of_the_hardware() -> None:
    def link(profile: Profile) -> tuple[float, float, float]:
        return profile.to_host_bytes_per_s, profile.from_host_bytes_per_s, profile.host_latency_s

    model, batch = llama(), batch_of()
    assert link(recollect.record(model, batch, fake=True, hardware="A100")) == (25e9, 25e9, 1e-5)
    unknown = replace(HARDWARE["A100"], host_link=None)
    assert link(recollect.record(model, batch, fake=True, hardware=unknown)) == (0, 0, 0)
    assert link(recollect.record(model, batch)) == (0, 0, 0), "it is not measured with the step"


@pytest.mark.parametrize("name", ["whisper", "resnet"])
def test_fake_recording_knows_no_workspaces(name: str) -> None:
    """Convolutions work in memory that only a real kernel shows.

    In evaluation mode: in training, Whisper in transformers 5.17 draws whether to skip a layer even where it never does.
    """
    case = ZOO[name]
    real = recollect.record(case.model().eval(), case.data(), loss_fn=case.loss_fn)
    fake = recollect.record(case.model().eval(), case.data(), loss_fn=case.loss_fn, fake=True)
    assert all(one <= other for one, other in zip(classic_peaks(fake), classic_peaks(real), strict=True))


@pytest.mark.parametrize("given", ["", "attention_mask", "position_ids"])
@pytest.mark.parametrize("kind", ["Llama", "Bert"])
def test_models_of_transformers_make_the_masks_of_eager_mode(kind: str, given: str) -> None:
    """None, where nothing is padded or packed, which fake tensors do not tell."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes, vocab_size=32, use_cache=False)
    model = getattr(transformers, f"{kind}For{'CausalLM' if kind == 'Llama' else 'MaskedLM'}")(config).eval()
    tokens = torch.randint(1, 32, (2, 64))
    more = {"attention_mask": torch.ones_like(tokens), "position_ids": torch.arange(64).expand(2, 64)}
    batch = {"input_ids": tokens, "labels": tokens, **({given: more[given]} if given else {})}
    real, fake = (recollect.record(model, batch, fake=is_fake) for is_fake in (False, True))
    assert [[op.name for op in graph.ops] for graph in fake.graphs] == [
        [op.name for op in graph.ops] for graph in real.graphs
    ]
    assert classic_peaks(fake) == pytest.approx(classic_peaks(real), rel=0.001)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")


@needs_proc
def test_fake_recording_needs_no_memory() -> None:
    """Four layers of the 7B shapes in bf16: parameters of 2 GiB and activations of more."""
    config = llama_config(
        num_layers=4, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, vocab_size=32000
    )
    with torch.device("meta"):
        model = GPTModel(config).bfloat16()
    batch = batch_of(config, sequences=1, length=4096)
    before = _resident_bytes()
    profile = recollect.record(model, batch, optimizer=torch.optim.AdamW(model.parameters()), fake=True)
    assert _resident_bytes() - before < 0.25 * GIB
    parameters = 2 * config.num_parameters
    assert profile.persistent["parameters"] == parameters
    # Two moments for each parameter, and a count of steps in fp32 for each tensor.
    assert profile.persistent["optimizer_state"] == 2 * parameters + 4 * len(list(model.parameters()))
    keep_all, full, _ = classic_peaks(profile)
    assert keep_all - profile.persistent_bytes > 2 * GIB
    assert keep_all > full


def _steers(hidden: Tensor) -> Tensor:
    return hidden if hidden.sum() > 0 else -hidden


class Steered(nn.Module):
    """Two layers whose Python looks at numbers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        wide = (
            Computes(lambda self, x: self.linear(x.reshape(-1, 4)).tanh(), linear=nn.Linear(4, 4)) for _ in range(2)
        )
        self.layers = nn.ModuleList(wide)
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = self.function(layer(hidden))
        return hidden


@pytest.mark.parametrize(
    "function",
    [
        _steers,
        lambda x: x * x.max().item(),
        lambda x: x[(x > 0).all(1)],
        lambda x: x[x.detach().sum(1).nonzero()[:, 0]],
        lambda x: x * x.argmax(1).bincount().sum(),
    ],
    ids=["if", "item", "mask", "nonzero", "bins"],
)
def test_data_dependent_model_cannot_be_recorded_fake(function: Callable[[Tensor], Tensor]) -> None:
    model, batch = Steered(function), torch.ones(3, 4)
    message = r"^cannot record Steered on fake tensors: the model \(Steered, .*test_record_fake\.py:\d+\) asks for the content "
    with pytest.raises(RecordError, match=message):
        recollect.record(model, batch, loss_fn=mean_square, fake=True)
    assert recollect.record(model, batch, loss_fn=mean_square).calls


def test_the_module_that_asks_for_content_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Steered(lambda x: x * x.max().item())))
    with pytest.raises(
        RecordError,
        match=r"module '1\.0' \(Steered, .*test_record_fake\.py:\d+\) asks for the content of a tensor \(aten\..*\)\. Make it "
        r"depend only on shapes, .*; or record on real tensors, .*: recollect\.record\(model, batch, fake=False\)",
    ):
        recollect.record(model, torch.ones(3, 4), loss_fn=mean_square, fake=True)
    with pytest.raises(RecordError, match="the loss, or what is around the model, asks for the content of a tensor"):
        recollect.record(model[0], torch.ones(3, 4), loss_fn=lambda x: x.sum() * x.max().item(), fake=True)


def test_code_for_real_tensors_only_is_told_from_a_wrong_batch() -> None:
    model = nn.Sequential(Computes(lambda self, x: self.router.to(x.dtype)(x), router=nn.Linear(4, 4)))
    # PyTorch refuses to convert a fake weight to which there is a weak reference.
    model[0].register_forward_pre_hook(lambda self, _: vars(self).update(seen=weakref.ref(self.router.weight)))
    with pytest.raises(
        RecordError, match=r"rejected the batch .*such as to\(\) of a module .*: see if fake=False works"
    ):
        recollect.record(model, torch.ones(3, 4), loss_fn=mean_square, fake=True)
    assert recollect.record(model, torch.ones(3, 4), loss_fn=mean_square).calls


def test_counts_into_named_bins_are_recorded_fake() -> None:
    """As mixtures in transformers 5.17 count the tokens of each expert."""
    model, batch = Steered(lambda x: x * x.argmax(1).bincount(minlength=4)), torch.ones(3, 4)
    real, fake = (
        recollect.record(model, batch, loss_fn=mean_square, fake=fake, gradients="freed") for fake in (False, True)
    )
    assert classic_peaks(fake) == classic_peaks(real)
    assert [call.path for call in fake.calls] == [call.path for call in real.calls]


def test_times_are_for_the_hardware_that_is_named(tmp_path: Path) -> None:
    config = llama_config(num_layers=2, hidden_size=1024, num_attention_heads=16, vocab_size=512)
    with torch.device("meta"):
        model = GPTModel(config).bfloat16()
    batch = batch_of(config, sequences=1, length=1024)
    profiles = {
        name: recollect.record(model, batch, fake=True, hardware=name) for name in ("B200", "H100", "L40S", "RTX 4090")
    }
    times = [profile.step_s for profile in profiles.values()]
    assert times == sorted(times)
    assert times[0] < 0.7 * times[-1]
    assert profiles["L40S"].device_name == "NVIDIA L40S"
    path = tmp_path / "l40s.json"
    path.write_text(HARDWARE["L40S"].to_json(), encoding="utf-8")
    assert recollect.record(model, batch, fake=True, hardware=path) == profiles["L40S"]
    assert recollect.record(model, batch, fake=True, hardware=HARDWARE["L40S"]) == profiles["L40S"]
    assert Profile.from_json(profiles["L40S"].to_json()).device_name == "NVIDIA L40S"
    # Its memory is what a budget such as "10% of the device" is a part of.
    assert profiles["L40S"].device_memory_bytes == 48 * 2**30
    assert recollect.plan(profiles["L40S"], "10% of the device").budget_bytes == 48 * 2**30 // 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default is the GPU that is there")
def test_times_are_for_an_h100_by_default() -> None:
    assert recollect.record(llama(), batch_of(), fake=True).device_name == "NVIDIA H100 SXM"


def test_hardware_that_nobody_knows() -> None:
    with pytest.raises(HardwareError, match=r"^hardware: got 'H10', expected one of H100, .* Did you mean 'H100'"):
        recollect.record(llama(), batch_of(), fake=True, hardware="H10")


def test_hardware_without_fake() -> None:
    message = (
        r"^hardware: got 'H100' with fake=False, where times are measured on the device itself; expected none, or "
        r"fake=True\.$"
    )
    with pytest.raises(HardwareError, match=message):
        recollect.record(llama(), batch_of(), hardware="H100")


def test_recurrent_layers_on_fake_tensors_get_a_warning() -> None:
    """What their kernels keep for backward has no size there."""
    layers = [Computes(lambda self, hidden: self.lstm(hidden)[0], lstm=nn.LSTM(8, 8)) for _ in range(2)]
    with pytest.warns(ConfigWarning, match=r"predicted peaks are too low\. Record on real tensors"):
        recollect.record(nn.Sequential(*layers), torch.randn(2, 4, 8), loss_fn=torch.sum, fake=True)
