"""Writes that raise no version, by collectives and by address: exact under any plan, or refused in the first forward."""

from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from rank_programs import run_on_ranks
from unseen_collectives import UNSEEN, every_kind

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs PyTorch with torch.distributed")


def test_every_kind_is_exact_or_refused(tmp_path: Path) -> None:
    for found in run_on_ranks(partial(every_kind, num_random=1), tmp_path):
        for kind, outcomes in found.items():
            refused = [outcome for outcome in outcomes if outcome != "equal"]
            name, way = kind.split(", ")[:2]
            if name in UNSEEN and way not in ("in_a_function", "between units"):
                assert all("something that PyTorch does not see" in outcome for outcome in refused), kind
            else:
                assert not refused, (kind, refused[0])
