"""Values that go to the host's memory and come back, with the device's own streams: it has never run on one yet.

On the CPU the same plans run with threads.
"""

import torch

import recollect
from blocks import Stack
from device_steps import sized
from gradients import assert_same_gradients, gradients
from offload_programs import offload_of, plan_that_offloads, seen_names
from recollect.engine.offload.carriers import StreamCarrier
from recollect.measuring.meter import measure_peak
from recollect.plans.trip import Trip


class Trial:
    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        width = sized(device, 16, 1024)
        self.model = Stack(width, 6, 0.1).to(device)
        self.data = torch.randn(sized(device, 64, 8192), width, device=device)
        self.plain = gradients(self.model, self.data, torch.sum)
        self.names = seen_names(self.model, self.model.layers, self.step)

    def step(self) -> None:
        gradients(self.model, self.data, torch.sum)


def test_gradients_are_equal_and_memory_is_less(device: torch.device) -> None:
    trial = Trial(device)
    plain_bytes = measure_peak(trial.step, device=device).peak_growth_bytes
    for trip in (Trip(1, 1), Trip(3, 0), Trip(2, 1, leaves_in_backward=True)):
        with recollect.apply(trial.model, plan_that_offloads(trial.names, trip)) as applied:
            for _ in range(sized(device, 2, 10)):
                assert_same_gradients(trial.plain, gradients(trial.model, trial.data, torch.sum), str(trip))
            peak_bytes = {measure_peak(trial.step, device=device).peak_growth_bytes for _ in range(3)}
            assert offload_of(applied).host.pool.taken_bytes == 0
        # What leaves in backward is all there when that begins.
        assert len(peak_bytes) == 1 and (trip.leaves_in_backward or max(peak_bytes) < plain_bytes)


def test_no_copy_waits_on_the_host(cuda: torch.device) -> None:
    trial = Trial(cuda)
    with recollect.apply(trial.model, plan_that_offloads(trial.names)):
        trial.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            trial.model(trial.data).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_registered_memory_is_let_go(cuda: torch.device) -> None:
    """Memory that stayed registered could not be registered again at the same address."""
    for _ in range(4):
        memory = StreamCarrier().host_memory(1 << 24)
        there = torch.arange(1 << 24, device=cuda).to(torch.uint8)
        memory.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(memory, there.cpu())
        del memory
