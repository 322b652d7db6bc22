"""A device with a number of its own for each field."""

from recollect.costs.hardware import ArithmeticRate, Hardware, HostLink

SMALL = Hardware(
    name="small",
    device="cpu",
    memory_bytes=2**30,
    bandwidth_bytes_per_s=1e10,
    launch_s=1e-6,
    rates=(ArithmeticRate("fp32", 1e11, half_rate_outputs=100.0, half_rate_depth=10.0), ArithmeticRate("bf16", 4e11)),
    cache_bytes=2**20,
    cache_bytes_per_s=5e10,
    elements_per_s={"transcendental": 1e9},
    host_link=HostLink(to_host_bytes_per_s=2e9, from_host_bytes_per_s=3e9, latency_s=4e-6),
)
