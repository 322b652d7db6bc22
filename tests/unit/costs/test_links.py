"""Links between devices, and the times of collectives over them."""

from __future__ import annotations

import pytest

from recollect.costs.hardware_table import HARDWARE, find_hardware
from recollect.costs.links import LINKS, Cluster, Link, cluster_of
from recollect.errors import ConfigError, HardwareError

TOY = Cluster(find_hardware("H100"), Link("fast", 100.0, 1.0), Link("slow", 10.0, 5.0), devices_per_node=2)
START_S = 8.4e-6


def test_a_ring_passes_on_a_part_at_each_step() -> None:
    """Two ranks, 400 bytes: one step of 200 bytes over the fast link, or over the slow one between nodes."""
    assert TOY.collective_s("all_gather", 400, (0, 1)) == pytest.approx(START_S + 1 + 2)
    assert TOY.collective_s("reduce_scatter", 400, (1, 2)) == pytest.approx(START_S + 5 + 20)
    assert TOY.collective_s("all_reduce", 400, (0, 1)) == pytest.approx(START_S + 2 * (1 + 2))
    assert TOY.collective_s("all_to_all", 400, (0, 1, 2, 3)) == pytest.approx(START_S + 3 * (5 + 10))
    assert TOY.collective_s("all_reduce", 400, (3,)) == 0.0


def test_the_slowest_link_of_a_group_decides() -> None:
    assert [TOY.link_of(ranks).name for ranks in ((0, 1), (2, 3), (0, 2), (1, 2))] == ["fast", "fast", "slow", "slow"]
    assert TOY.send_s(30, (1, 2)) == 8.0


def test_every_gpu_of_the_table_has_links() -> None:
    clusters = {name: cluster_of(hardware) for name, hardware in HARDWARE.items() if hardware.device == "cuda"}
    assert all(cluster.within.bytes_per_s >= cluster.between.bytes_per_s for cluster in clusters.values())
    assert clusters["B200"].within == LINKS["NVLink 5"]


def test_links_have_to_be_given_for_other_devices() -> None:
    with pytest.raises(HardwareError, match=r"hardware 'AMD EPYC .*': its links to other devices are not known"):
        cluster_of(find_hardware("cpu"))
    assert cluster_of(find_hardware("cpu"), within="PCIe 5", between="InfiniBand HDR").devices_per_node == 8


def test_an_unknown_link_and_an_empty_node_are_refused() -> None:
    with pytest.raises(HardwareError, match=r"link: got 'nvlink4', expected one of .*Did you mean 'NVLink 4'\?"):
        cluster_of(find_hardware("H100"), within="nvlink4")
    with pytest.raises(ConfigError, match="devices_per_node=0: it counts devices"):
        cluster_of(find_hardware("H100"), devices_per_node=0)


def test_links_of_the_h800_are_slower_than_those_of_the_h100() -> None:
    h100, h800 = (cluster_of(find_hardware(name)) for name in ("H100", "H800"))
    assert h800.within.bytes_per_s == 160e9 < h100.within.bytes_per_s
    assert h800.between == h100.between
    assert h800.hardware.rates == h100.hardware.rates
