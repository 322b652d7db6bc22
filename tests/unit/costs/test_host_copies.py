"""What copies between a device and the memory of its host reach: measured on the CPU, and in streams of a pretend device."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from recollect.costs.host_copies import Copies, copies_in_streams, measure_host_link, reached
from recollect.errors import HardwareError

MIB = 2**20
LATENCY_S = 5e-6


def test_copies_of_the_cpu() -> None:
    threads = threading.active_count()
    found = measure_host_link(torch.device("cpu"))
    # Orders of magnitude, on any machine and beside any load.
    assert 1e7 < found.to_host_bytes_per_s < 1e13
    assert 1e7 < found.from_host_bytes_per_s < 1e13
    assert 0 < found.latency_s < 0.1
    assert threading.active_count() == threads


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_of_the_gpu() -> None:
    found = measure_host_link(torch.device("cuda"))
    assert 1e9 < found.to_host_bytes_per_s < 1e12
    assert 1e9 < found.from_host_bytes_per_s < 1e12
    assert 1e-7 < found.latency_s < 1e-3


def test_rates_are_medians_of_the_copies_while_both_directions_ran() -> None:
    small = [(9.0, 9.1), (9.1, 9.2), (9.2, 9.8)]
    out = Copies([(0.0, 4.0), (4.0, 6.0), (6.0, 8.0), (8.0, 8.5), (8.5, 8.9), (8.9, 9.0)], small)
    back = Copies([(1.0, 2.0), (2.0, 3.0), (3.0, 8.0)], [(8.0, 8.2), (8.2, 8.3)])
    found = reached(out, back)
    # Out: two copies of 2 s. Back: all three of them. The small ones never met.
    assert found.to_host_bytes_per_s == pytest.approx(64 * MIB / 2)
    assert found.from_host_bytes_per_s == pytest.approx(64 * MIB / 1)
    assert found.latency_s == pytest.approx(0.15)


class PretendStream:
    """Copies take time here, and none to enqueue."""

    def __init__(self, device: PretendDevice) -> None:
        self.device = device
        self.now_s = 0.0
        self.is_over = False

    def __enter__(self) -> None:
        self.device.before, self.device.current = self.device.current, self

    def __exit__(self, *raised: object) -> None:
        self.device.current = self.device.before

    def wait_event(self, event: PretendEvent) -> None:
        self.now_s = max(self.now_s, event.at_s)

    def synchronize(self) -> None:
        self.is_over = True


class PretendEvent:
    def __init__(self, device: PretendDevice, *, enable_timing: bool) -> None:
        assert enable_timing
        self.device = device

    def record(self) -> None:
        self.stream, self.at_s = self.device.current, self.device.current.now_s

    def elapsed_time(self, later: PretendEvent) -> float:
        assert later.stream.is_over, "an event that may not have come has no time"
        return 1000 * (later.at_s - self.at_s)


class PretendDevice:
    """Stands in for `torch`: the streams of its accelerator work beside each other."""

    def __init__(self) -> None:
        self.current = self.before = self.Stream()
        self.current.now_s = 7.0

    def Stream(self) -> PretendStream:
        return PretendStream(self)

    def Event(self, *, enable_timing: bool) -> PretendEvent:
        return PretendEvent(self, enable_timing=enable_timing)


class PretendTensor:
    def __init__(self, device: PretendDevice, bytes_per_s: float, nbytes: int = 64 * MIB) -> None:
        self.device, self.bytes_per_s, self.nbytes = device, bytes_per_s, nbytes

    def __getitem__(self, part: slice) -> PretendTensor:
        return PretendTensor(self.device, self.bytes_per_s, part.stop)

    def copy_(self, source: PretendTensor, *, non_blocking: bool) -> None:
        assert non_blocking and source.nbytes == self.nbytes
        self.device.current.now_s += LATENCY_S + self.nbytes / self.bytes_per_s


def test_copies_in_streams_have_the_rate_of_their_direction() -> None:
    device = PretendDevice()
    out, back = ((PretendTensor(device, rate), PretendTensor(device, rate)) for rate in (170e9, 410e9))
    copies: Any = copies_in_streams(device, out, back)  # type: ignore[arg-type]
    assert [len(one) for way in copies for one in way] == [15, 16, 15, 16]
    assert all(begin > 0 for way in copies for one in way for begin, _ in one), "the tensors were not filled yet"
    found = reached(*copies)
    assert found.to_host_bytes_per_s == pytest.approx(170e9, rel=0.05)
    assert found.from_host_bytes_per_s == pytest.approx(410e9, rel=0.05)
    assert found.latency_s == pytest.approx(LATENCY_S + 4096 / 170e9)


def test_a_device_without_streams_is_refused() -> None:
    message = (
        r"^link to the host: got device 'meta', expected 'cpu', or an accelerator with streams that PyTorch finds here, "
        r"such as 'cuda'\.$"
    )
    with pytest.raises(HardwareError, match=message):
        measure_host_link(torch.device("meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        HardwareError, match=r"^link to the host: got device 'cuda:0', expected 'cpu', or an accelerator"
    ):
        measure_host_link(torch.device("cuda:0"))


def test_a_folder_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    message = (
        r"^link to the host: cannot map a temporary file of 64 MiB \(.*gone.*\), expected room for two of them\. Free some, or "
        r"name a different folder in the environment as TMPDIR\.$"
    )
    with pytest.raises(HardwareError, match=message):
        measure_host_link(torch.device("cpu"))
