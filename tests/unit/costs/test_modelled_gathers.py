"""What it takes, by the cost model, to gather a value of which each rank holds a part."""

import pytest

from recollect.costs.hardware_table import find_hardware
from recollect.costs.links import cluster_of
from recollect.costs.modelled_costs import ModelledCosts


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
