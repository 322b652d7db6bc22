"""Links between devices, the times of collectives over them, and what it takes to gather a value that ranks hold as parts."""

import itertools

import pytest
import torch
from torch._inductor import comm_analysis, config

from recollect.costs.hardware_table import HARDWARE, find_hardware
from recollect.costs.links import LINKS, Cluster, Link, cluster_of
from recollect.costs.modelled_costs import ModelledCosts
from recollect.errors import ConfigError, HardwareError

TOY = Cluster(find_hardware("H100"), Link("fast", 100.0, 1.0), Link("slow", 10.0, 5.0), devices_per_node=2)
START_S = 8.4e-6


def test_a_ring_passes_on_a_part_at_each_step() -> None:
    """Two ranks, 400 bytes: one step of 200 bytes over the fast link, or over the slow one between nodes."""
    assert TOY.collective_s("all_gather", 400, (0, 1)) == pytest.approx(START_S + 1 + 2)
    assert TOY.collective_s("reduce_scatter", 400, (1, 2)) == pytest.approx(START_S + 5 + 20)
    assert TOY.collective_s("all_reduce", 400, (0, 1)) == pytest.approx(START_S + 2 * (1 + 2))
    assert TOY.collective_s("all_reduce", 400, (3,)) == 0.0


def test_rings_use_the_adapters_of_all_their_devices_in_a_node() -> None:
    """Four ranks, 400 bytes: three steps of 100 bytes, one of them between nodes, at twice the rate of one adapter."""
    assert TOY.collective_s("all_gather", 400, (0, 1, 2, 3)) == pytest.approx(START_S + 2 * 1 + 5 + 300 / (2 * 10))
    # As many as in the node that has the fewest.
    assert TOY.collective_s("all_gather", 300, (0, 1, 2)) == pytest.approx(START_S + 1 + 5 + 200 / 10)
    # Links within a node can be the slower ones.
    slow_within = Cluster(TOY.hardware, TOY.between, TOY.within, devices_per_node=2)
    assert slow_within.collective_s("all_gather", 400, (0, 1, 2, 3)) == pytest.approx(START_S + 2 * 5 + 1 + 300 / 10)


def test_devices_share_what_adapters_a_node_has() -> None:
    """Groups of one device a node run side by side: each has the share of its device, and no more."""
    own, shared = (cluster_of(find_hardware("A100"), adapters_per_node=count) for count in (8, 4))
    apart, together = range(0, 64, 8), range(64)
    assert own.collective_s("all_gather", 16e9, apart) == pytest.approx(16e9 * 7 / 8 / 20e9, rel=1e-3)
    assert shared.collective_s("all_gather", 16e9, apart) == pytest.approx(16e9 * 7 / 8 / 10e9, rel=1e-3)
    assert shared.collective_s("all_gather", 16e9, together) == pytest.approx(16e9 * 63 / 64 / (4 * 20e9), rel=0.01)
    assert shared.send_s(1e9, (7, 8)) == pytest.approx(1 / 10, rel=1e-3)


def test_an_exchange_sends_over_both_links_at_once() -> None:
    """Four ranks, 400 bytes each: 100 for the other of the node, 200 for the other node, by each device's own adapter."""
    assert TOY.collective_s("all_to_all", 400, (0, 1, 2, 3)) == pytest.approx(START_S + 2 * 1 + 5 + 200 / 10)
    assert TOY.collective_s("all_to_all", 400, (0, 1)) == pytest.approx(START_S + 1 + 200 / 100)


def test_times_are_those_of_pytorch_s_mirror_of_nccl() -> None:
    """Which is told what a node has in place of what an adapter has.

    Within a node both are the same but for NCCL's protocols for small messages. Between nodes it takes off up to 23 % for few
    nodes, and adds up to (bytes / 50 MB)^0.17 for adapters that larger messages use; here all adapters count throughout.
    """
    if torch.cuda.is_available() or not hasattr(comm_analysis, "INTERCONNECT_PROFILES"):
        pytest.skip("it is about the GPUs that are here, or an older model")
    a100s = cluster_of(find_hardware("A100"))
    kinds = {
        "all_gather": comm_analysis.NCCL_COLL.ALL_GATHER,
        "reduce_scatter": comm_analysis.NCCL_COLL.REDUCE_SCATTER,
    }
    with config.patch(intra_node_bw=240.0, inter_node_bw=8 * 20.0):
        for kind, count, size in itertools.product(kinds, (2, 4, 8, 16, 32, 64, 128), (16, 32, 64, 128, 256)):
            nbytes = size << 20
            theirs_s = 1e-3 * comm_analysis.estimate_nccl_collective_runtime_impl(nbytes, count, kinds[kind])
            ratio = a100s.collective_s(kind, nbytes, range(count)) / theirs_s
            assert (0.99 < ratio < 1.01) if count <= 8 else (0.77 < ratio < 1.33), (kind, count, size)


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
    with pytest.raises(ConfigError, match="adapters_per_node=0: it counts adapters"):
        cluster_of(find_hardware("H100"), adapters_per_node=0)


def test_a_gather_takes_what_the_links_say() -> None:
    hardware = find_hardware("H100")
    cluster = cluster_of(hardware)
    costs = ModelledCosts(hardware, cluster)
    within, beyond = ((0, 1, 2, 3), (0, 8, 16, 24))
    assert costs.gather_s(1 << 20, within) == cluster.collective_s("all_gather", 1 << 20, within)
    assert costs.gather_s(1 << 20, beyond) > costs.gather_s(1 << 20, within) > 0


def test_without_a_cluster_it_takes_as_long_as_a_copy() -> None:
    """Written and read once, like the collectives that are recorded without one."""
    costs = ModelledCosts(find_hardware("H100"))
    more_s = costs.gather_s(2 << 30, (0, 1)) - costs.gather_s(1 << 30, (0, 1))
    assert more_s == pytest.approx(2 * (1 << 30) / 3.35e12, rel=0.3)
