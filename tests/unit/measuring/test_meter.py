"""The meter is exact: each expected number of bytes is worked out by hand."""

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Event, Thread

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from recollect import _torch_memory
from recollect.errors import MeterError, QuantityError
from recollect.measuring import device_memory
from recollect.measuring.deaths import reachable_storages
from recollect.measuring.meter import PeakMeasurement, measure_peak, storage_bytes

KIB = 1024


def zeros(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def test_asking_the_allocator_takes_next_to_nothing() -> None:
    """It is asked in the middle of a step."""
    device_memory._mallinfo.cache_clear()
    asked = measure_peak(lambda: device_memory.held_now(torch.device("cpu")), device="cpu", baseline_bytes=0)
    assert asked.peak_bytes <= 4 * KIB


def test_garbage_is_collected_where_tensors_would_take_too_much_with_it() -> None:
    cpu, num_bytes = torch.device("cpu"), 2**22
    before = device_memory.tensor_bytes(cpu)
    gc.disable()
    try:
        cycle: list[object] = [zeros(num_bytes)]
        cycle.append(cycle)
        del cycle
        assert device_memory.tensor_bytes(cpu, enough_bytes=before + 2 * num_bytes) >= before + num_bytes
        assert device_memory.tensor_bytes(cpu, enough_bytes=before) < before + num_bytes
    finally:
        gc.enable()


def test_known_allocations_to_the_byte() -> None:
    def program() -> torch.Tensor:
        kept = zeros(1000)
        transient = zeros(5001)
        del transient
        return torch.cat([kept, zeros(77)])

    found = measure_peak(program, device="cpu", baseline_bytes=0)
    assert found.peak_bytes == 1000 + 5001
    assert found.end_bytes == storage_bytes([found.result]) == 1077
    assert found.num_events == 7  # four allocations; all but the result freed
    assert found.peak_reserved_bytes is None


def test_chain_by_hand_forward_and_backward() -> None:
    def program() -> torch.Tensor:
        weight = torch.randn(KIB, requires_grad=True)  # 4 KiB
        loss = weight.exp().sin().sum()  # exp and sin 4 KiB each, sum 4 bytes; sin's output is not saved
        # Backward: a gradient of 4 bytes, expanded; cos and its product 4 KiB each, beside weight and exp.
        loss.backward()
        assert weight.grad is not None
        return weight.grad

    found = measure_peak(program, baseline_bytes=0)
    assert found.peak_bytes == 4 * 4 * KIB + 4 + 4
    assert found.end_bytes == 4 * KIB


def test_workspace_inside_an_op_is_seen() -> None:
    # The kernel sorts a copy of the keys and an index; how much it takes besides is its own business.
    values = torch.randn(KIB)
    found = measure_peak(values.unique, device="cpu", baseline_bytes=0)
    assert found.peak_bytes > found.end_bytes


def test_memory_from_before_that_dies_inside_is_subtracted_when_it_dies() -> None:
    old = [zeros(10_000), zeros(20_000), zeros(30_000)]

    def program() -> None:
        first = zeros(5_000)
        del old[1]
        second = zeros(18_000)  # 3000 above the start: 5000 + 18000 - 20000
        del first, second
        del old[1]
        last = zeros(40_000)  # 10000 below the start
        del last

    found = measure_peak(program, device="cpu", baseline_bytes=100_000)
    assert found.start_bytes == 100_000
    assert found.peak_growth_bytes == 5_000
    assert found.end_bytes == 50_000
    assert found.num_events == 6


def test_gradients_from_before_are_known_though_only_autograd_made_them() -> None:
    layer = torch.nn.Linear(100, 100, bias=False)
    layer(torch.ones(1, 100)).sum().backward()
    found = measure_peak(layer.zero_grad)
    assert found.end_bytes - found.start_bytes == -40_000


def test_sizes_that_an_earlier_trace_remembers_are_not_believed() -> None:
    # So large that the C library maps it on its own, at the address that has just become free; unless another hole fits.
    for num_bytes in range(40 * 2**20, 80 * 2**20, 2**20):
        address = measure_peak(lambda: torch.empty(num_bytes, dtype=torch.uint8)).result.data_ptr()  # noqa: B023
        old = [torch.empty(num_bytes - 1, dtype=torch.uint8)]
        if old[0].data_ptr() == address:
            break
    else:
        pytest.skip("the C library never used an address again")

    found = measure_peak(old.clear, baseline_bytes=2 * num_bytes)
    assert (found.peak_bytes, found.end_bytes, found.num_events) == (2 * num_bytes, num_bytes + 1, 0)


def test_default_baseline_is_what_python_can_reach() -> None:
    before = measure_peak(lambda: None).start_bytes
    held = [torch.zeros(1000), torch.nn.Parameter(torch.zeros(10))]
    held.append(held[0][5:])
    assert measure_peak(lambda: None).start_bytes - before == 4040


def test_sparse_and_fake_tensors_alive_at_the_start_do_no_harm() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = measure_peak(lambda: None).start_bytes
    with FakeTensorMode():
        fake = torch.empty(1000)
    sparse = torch.ones(1).to_sparse()
    meta = torch.empty(10, device="meta")
    assert 0 <= measure_peak(lambda: None).start_bytes - before <= 12
    assert len(fake) == 1000 and sparse.is_sparse and meta.is_meta


def test_reentrant_backward_is_covered() -> None:
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            with torch.enable_grad():
                inner = torch.zeros(10_000, requires_grad=True)
                inner.sum().backward()
            return grad

    def program() -> None:
        Inner.apply(torch.zeros(1, requires_grad=True)).sum().backward()

    assert measure_peak(program).peak_growth_bytes >= 40_000


def test_measuring_shows_no_op_to_the_programs_modes() -> None:
    class Listen(TorchDispatchMode):
        seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    old = [zeros(10_000)]
    listen = Listen()

    def program() -> None:
        with listen:
            old.clear()

    found = measure_peak(program)
    assert found.end_bytes - found.start_bytes == -10_000
    assert listen.seen == []


def test_exception_propagates_and_the_profiler_stops() -> None:
    def program() -> None:
        zeros(10)
        raise KeyError("from inside")

    for _ in range(2):
        with pytest.raises(KeyError, match="from inside"):
            measure_peak(program)
    assert not torch.autograd._profiler_enabled()
    assert measure_peak(lambda: zeros(10)).peak_growth_bytes == 10


def test_nested_use_is_an_error_and_the_next_measurement_works() -> None:
    with pytest.raises(MeterError, match="called inside a running measure_peak. Measure one callable at a time"):
        measure_peak(lambda: measure_peak(lambda: None))
    assert measure_peak(lambda: zeros(10)).peak_growth_bytes == 10


def test_another_profiler_is_an_error() -> None:
    with torch.autograd.profiler.profile(), pytest.raises(MeterError, match="a profiler is already active"):
        measure_peak(lambda: None)


def test_the_users_profiler_on_another_thread_is_an_error() -> None:
    """PyTorch crashes where two threads profile."""
    said: list[str] = []

    def measures() -> None:
        with pytest.raises(MeterError) as raised:
            measure_peak(lambda: None)
        said.append(str(raised.value))

    thread = Thread(target=measures)
    with torch.autograd.profiler.profile():
        thread.start()
        thread.join()
    assert "a profiler is already active" in said[0]


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = Event(), Event()

    def waits() -> None:
        begun.set()
        may_end.wait()

    thread = Thread(target=lambda: measure_peak(waits))
    thread.start()
    begun.wait()
    with monkeypatch.context() as patch:
        patch.setattr(_torch_memory, "_MOST_WAIT_S", 0.01)
        with pytest.raises(MeterError, match="^a different thread has measured memory on the CPU"):
            measure_peak(lambda: None)
    others = [Thread(target=lambda: measure_peak(lambda: zeros(10))) for _ in range(3)]
    for one in others:
        one.start()
    may_end.set()
    for one in (thread, *others):
        one.join()
    assert measure_peak(lambda: zeros(10)).peak_growth_bytes == 10


def test_a_tuple_that_another_thread_fills_is_left_alone() -> None:
    """Python cannot give a tuple its final size while somebody else holds it."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    errors: list[SystemError] = []
    is_over = Event()

    def fills() -> None:
        while not is_over.is_set():
            try:
                tuple(sum(range(100)) for _ in range(30))
            except SystemError as error:
                errors.append(error)

    thread = Thread(target=fills)
    thread.start()
    kept, many = zeros(10), [[number] for number in range(100_000)]
    for _ in range(10):
        assert many and any(storage.data_ptr() == kept.data_ptr() for storage in reachable_storages())
    is_over.set()
    thread.join()
    sys.setswitchinterval(before_s)
    assert not errors


def test_a_tensor_that_another_thread_has_not_finished_is_left_out() -> None:
    class Unmade(torch.Tensor):
        @property
        def is_leaf(self) -> bool:
            raise RuntimeError("cannot call get_autograd_meta() on undefined tensor")

    unmade = Unmade(10)
    assert not any(storage is unmade.untyped_storage() for storage in reachable_storages())


def test_unknown_devices_and_baselines_are_errors() -> None:
    with pytest.raises(MeterError, match="got device 'meta', expected a CPU or CUDA device"):
        measure_peak(lambda: None, device="meta")
    with pytest.raises(QuantityError, match="-1: negative"):
        measure_peak(lambda: None, baseline_bytes=-1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_absent_cuda_is_an_error() -> None:
    with pytest.raises(MeterError, match="got device 'cuda', but this PyTorch finds no CUDA device"):
        measure_peak(lambda: None, device="cuda")


def test_printed_form() -> None:
    found = PeakMeasurement(
        device="cpu",
        start_bytes=2**20,
        peak_bytes=3 * 2**20,
        end_bytes=2**20,
        peak_requested_bytes=None,
        peak_reserved_bytes=None,
        fragmentation_bytes=None,
        num_events=4,
        result=None,
    )
    assert str(found) == "peak 3.0 MiB on cpu: 1.0 MiB before, 2.0 MiB on top"
    on_cuda = replace(found, device="cuda:0", peak_reserved_bytes=20 * 2**20, fragmentation_bytes=17 * 2**20)
    assert str(on_cuda).endswith("2.0 MiB on top; reserved 20.0 MiB, 17.0 MiB of it fragmentation")
    assert recollect.measure_peak is measure_peak


def test_storage_bytes_counts_each_storage_once_and_whole() -> None:
    base = torch.zeros(100)
    assert storage_bytes([]) == 0
    assert storage_bytes([base, base[:3], base.view(10, 10).t(), base.detach()]) == 400
    assert storage_bytes(tensor for tensor in (base[:3], torch.zeros(5, dtype=torch.float64))) == 440
    # On the meta device all addresses are equal.
    assert storage_bytes([torch.empty(10, device="meta"), torch.empty(20, device="meta")]) == 120


@pytest.mark.filterwarnings("ignore:Sparse")
def test_storage_bytes_counts_indices_and_values_of_sparse_tensors() -> None:
    assert storage_bytes([torch.eye(4).to_sparse()]) == 4 * (2 * 8 + 4)
    begins, others, values = torch.arange(5), torch.arange(4), torch.ones(4)
    blocks = torch.ones(4, 2, 2)
    for make in (torch.sparse_csr_tensor, torch.sparse_csc_tensor):
        assert storage_bytes([make(begins, others, values)]) == 5 * 8 + 4 * 8 + 4 * 4
    for make in (torch.sparse_bsr_tensor, torch.sparse_bsc_tensor):
        assert storage_bytes([make(begins, others, blocks)]) == 5 * 8 + 4 * 8 + 16 * 4


def test_storage_bytes_rejects_tensors_without_storage() -> None:
    with pytest.raises(
        MeterError, match=r"got a torch._mkldnn tensor of shape \[2, 3\], expected a strided or sparse one"
    ):
        storage_bytes([torch.zeros(2, 3).to_mkldnn()])


@pytest.fixture
def cuda_program() -> Iterator[Callable[[], torch.Tensor]]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    yield lambda: torch.zeros(2**20, device="cuda").exp()
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_cuda_counts_allocated_and_reserved(cuda_program: Callable[[], torch.Tensor]) -> None:
    found = measure_peak(cuda_program, device="cuda")
    assert found.peak_growth_bytes == 8 * 2**20
    assert found.end_bytes - found.start_bytes == 4 * 2**20
    assert found.peak_reserved_bytes is not None and found.peak_requested_bytes is not None
    assert found.peak_requested_bytes <= found.peak_bytes <= found.peak_reserved_bytes
    assert found.fragmentation_bytes == found.peak_reserved_bytes - found.peak_bytes
    assert measure_peak(cuda_program, device="cuda", baseline_bytes=5).start_bytes == 5
