"""What connects devices with the memory of their hosts."""

from typing import Any

import pytest

from recollect.costs.hardware import HostLink
from recollect.costs.hardware_table import HARDWARE, HOST_LINKS
from recollect.profile.profile import Profile
from toy_profile import stack


def test_every_gpu_of_the_table_has_the_link_of_its_data_sheet() -> None:
    names = {link: name for name, link in HOST_LINKS.items()}
    links = {
        name: names[known.host_link] for name, known in HARDWARE.items() if known.host_link and known.device == "cuda"
    }
    pcie_4 = {"A100 40GB", "A100", "A100 80GB PCIe", "L40S", "RTX 4090"}
    assert links.keys() == HARDWARE.keys() - {"cpu"}
    assert {name for name, link in links.items() if link == "PCIe 4"} == pcie_4
    assert {name for name, link in links.items() if link == "NVLink-C2C"} == {"GH200"}


def test_copies_reach_less_than_the_data_sheet_says() -> None:
    data_sheets = {"PCIe 4": 32e9, "PCIe 5": 64e9, "NVLink-C2C": 450e9}
    for name, link in HOST_LINKS.items():
        assert max(link.to_host_bytes_per_s, link.from_host_bytes_per_s) < data_sheets[name]


def test_numbers_have_their_places_in_a_profile() -> None:
    facts: dict[str, Any] = HostLink(1e9, 2e9, 3e-6).profile_fields()
    profile = Profile((), (), stack(1).log, 0.0, **facts)
    assert (profile.to_host_bytes_per_s, profile.from_host_bytes_per_s, profile.host_latency_s) == (1e9, 2e9, 3e-6)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_rates_that_cannot_be(rate: float) -> None:
    with pytest.raises(
        ValueError, match=rf"^host_link: to_host_bytes_per_s: got {rate}, expected a finite number above 0$"
    ):
        HostLink(rate, 1e9, 0.0)
    with pytest.raises(
        ValueError, match=rf"^host_link: from_host_bytes_per_s: got {rate}, expected a finite number above"
    ):
        HostLink(1e9, rate, 0.0)


@pytest.mark.parametrize("latency_s", [-1e-6, float("inf"), float("nan")])
def test_latencies_that_cannot_be(latency_s: float) -> None:
    with pytest.raises(
        ValueError, match=rf"^host_link: latency_s: got {latency_s}, expected a finite number, 0 or more$"
    ):
        HostLink(1e9, 1e9, latency_s)
    assert HostLink(1e9, 1e9, 0.0).latency_s == 0
