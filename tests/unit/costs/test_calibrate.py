"""Calibration: what is measured, what is fitted, and the command around it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recollect.cli import main
from recollect.costs.calibrate import Calibration, MeasuredOp, Sizes, calibrate, calibration_ops, fit
from recollect.costs.hardware import KINDS, ArithmeticRate, Hardware
from recollect.costs.hardware_table import HARDWARE, find_hardware
from recollect.costs.roofline import seconds
from recollect.errors import HardwareError

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
SIZES = Sizes(
    (64, 1 << 10, 1 << 14, 1 << 18), ((64, 64, 64), (256, 256, 256), (256, 16, 256), (16, 256, 256)), (32, 64)
)
# A device that these small tensors can tell everything about: a large launch would hide the rest.
TRUTH = Hardware(
    name="truth",
    device="cpu",
    memory_bytes=2**30,
    bandwidth_bytes_per_s=2e9,
    traffic_efficiency=1.0,
    launch_s=2e-6,
    rates=(
        ArithmeticRate("fp32", 1e10, 1.0, 0.4, 0.3, half_rate_outputs=2000.0, half_rate_depth=8.0),
        ArithmeticRate("bf16", 4e10, 1.0, 0.2, 0.1, half_rate_outputs=1000.0, half_rate_depth=16.0),
    ),
    cache_bytes=200_000,
    cache_bytes_per_s=8e9,
    elements_per_s={"transcendental": 1e8, "random": 2e7, "sort": 1e7},
)


@pytest.fixture(scope="module")
def ops() -> list[MeasuredOp]:
    """Ops whose times are those of `TRUTH`, with a few percent of what the model does not describe."""
    found = calibration_ops(CPU, DTYPES, SIZES)
    for number, op in enumerate(found):
        op.seconds = [seconds(op.work, TRUTH) * (0.97 if number % 2 else 1.03)]
    return found


def test_every_kind_is_measured(ops: list[MeasuredOp]) -> None:
    assert {op.work.kind for op in ops} == set(KINDS)
    products = {(op.work.kind, op.work.dtype) for op in ops if op.work.flops}
    assert products == {(k, d) for k in ("matmul", "attention", "attention_backward") for d in ("fp32", "bf16")}
    assert any(op.is_tiny for op in ops)


def test_fit_finds_the_device_that_the_times_come_from(ops: list[MeasuredOp]) -> None:
    start = replace(TRUTH, launch_s=1.0, bandwidth_bytes_per_s=1.0, cache_bytes=0, cache_bytes_per_s=0.0)
    start = replace(start, elements_per_s={}, rates=(ArithmeticRate("fp32", 1.0), ArithmeticRate("bf16", 1.0)))
    fitted = fit(start, ops, None)
    # 3 % of noise, a law with a knee, and few sizes on either side of it.
    assert fitted.launch_s == pytest.approx(TRUTH.launch_s, rel=0.05)
    assert fitted.bandwidth_bytes_per_s == pytest.approx(TRUTH.bandwidth_bytes_per_s, rel=0.1)
    assert fitted.cache_bytes_per_s == pytest.approx(TRUTH.cache_bytes_per_s, rel=0.1)
    for kind, elements_per_s in TRUTH.elements_per_s.items():
        assert fitted.elements_per_s[kind] == pytest.approx(elements_per_s, rel=0.1)
    for truth in TRUTH.rates:
        found = fitted.rate(truth.dtype)
        assert found.peak_flops_per_s == pytest.approx(truth.peak_flops_per_s, rel=0.15)
        assert found.matmul_efficiency == 1.0
        assert found.attention_efficiency == pytest.approx(truth.attention_efficiency, rel=0.15)
        assert found.attention_backward_efficiency == pytest.approx(truth.attention_backward_efficiency, rel=0.15)
    ratios = Calibration(fitted, tuple(ops), rounds=1, elapsed_s=0.0).ratios()
    assert len(ratios) == len(ops)
    assert max(max(ratio, 1 / ratio) for ratio in ratios) < 1.25


def test_device_of_the_table_keeps_its_peaks(ops: list[MeasuredOp]) -> None:
    known = replace(
        HARDWARE["H100"],
        bandwidth_bytes_per_s=4e9,
        rates=(ArithmeticRate("fp32", 2e10), ArithmeticRate("bf16", 8e10), ArithmeticRate("fp8", 1e12)),
    )
    fitted = fit(TRUTH, ops, known)
    assert (fitted.bandwidth_bytes_per_s, fitted.rate("fp32").peak_flops_per_s) == (4e9, 2e10)
    assert fitted.traffic_efficiency == pytest.approx(0.5, rel=0.1)
    assert fitted.rate("fp32").matmul_efficiency == pytest.approx(0.5, rel=0.15)
    assert fitted.rate("bf16").attention_efficiency == pytest.approx(0.1, rel=0.15)
    assert fitted.rate("fp8") == known.rate("fp8")  # not measured


def test_quick_calibration_of_this_machine() -> None:
    before = torch.random.get_rng_state()
    measured = calibrate(CPU, quick=True)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (measured.hardware.device, measured.rounds) == ("cpu", 3)
    assert measured.hardware.name.endswith(f" thread{'' if torch.get_num_threads() == 1 else 's'}")
    assert measured.hardware.memory_bytes > 2**28
    assert measured.hardware.rate("fp32").peak_flops_per_s > 0 < measured.hardware.launch_s
    assert len(measured.ratios("matmul")) == 2 * 3
    link = measured.hardware.host_link
    assert link is not None and link.to_host_bytes_per_s > 0 < link.from_host_bytes_per_s


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_quick_calibration_of_the_gpu() -> None:
    hardware = calibrate(torch.device("cuda"), quick=True).hardware
    assert (hardware.device, hardware.name) == ("cuda", torch.cuda.get_device_name())
    assert hardware.host_link is not None and 1e9 < hardware.host_link.to_host_bytes_per_s < 1e12


def test_other_devices() -> None:
    with pytest.raises(HardwareError, match=r"^device: got 'meta', expected cpu or cuda; others are not measured\.$"):
        calibrate(torch.device("meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_gpu_that_is_not_there() -> None:
    message = r"^device: got cuda, but PyTorch finds no CUDA device here; expected cpu\.$"
    with pytest.raises(HardwareError, match=message):
        calibrate(torch.device("cuda"))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "hardware.json"
    assert main(["calibrate", "--quick", "--device", "cpu", "--out", str(out)]) == 0
    output = capsys.readouterr().out
    assert f"Written to {out}, for --hardware {out}." in output
    for word in (
        "fp32 large matrix products",
        "bf16 attention backward",
        "memory",
        "smallest op",
        "copies to the host's memory",
        "copies from the host's memory",
        "smallest copy",
        "off by a factor of",
    ):
        assert word in output
    hardware = find_hardware(out)
    assert hardware.name in output
    assert hardware.host_link is not None
    for rate in (hardware.host_link.to_host_bytes_per_s, hardware.host_link.from_host_bytes_per_s):
        assert f" {rate / 1e9:,.1f} GB/s" in output
    assert f" {hardware.host_link.latency_s * 1e6:.1f} us" in output
    step = ["--size", "tiny", "--batch-size", "4", "--seq-length", "128", "--fake", "--hardware", str(out)]
    plan = tmp_path / "plan.json"
    assert main(["plan", *step, "--memory-budget", "70%", "--out", str(plan)]) == 0


def test_command_that_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "none" / "hardware.json"
    assert main(["calibrate", "--quick", "--device", "cpu", "--out", str(out)]) == 2
    assert f"--out {out}: cannot be written" in capsys.readouterr().err
