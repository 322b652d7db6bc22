"""Layers with DTensors run from traces, over gloo in two processes: bits, bytes, and what stays on the tape."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rank_processes import rank_results
from traced_dtensors import LOOPS_OF, RANKS

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs PyTorch with the gloo backend")


ranks = rank_results(SUPPORT / "traced_dtensors.py", RANKS)


@pytest.mark.parametrize(("loop", "way"), [(loop, way) for way, loops in LOOPS_OF.items() for loop in loops])
def test_traces_have_the_bits_of_eager_mode(ranks: list[dict[str, Any]], loop: str, way: str) -> None:
    """No layer is left to the tape, which a warning would say."""
    for found in ranks:
        assert found[f"why not {way}"] == [""]
        assert found[f"{loop} {way}"] == {"same": True, "told": []}


def test_a_plan_that_was_suspended_goes_on_from_traces(ranks: list[dict[str, Any]]) -> None:
    """Ranks compare their plans in the first step, which dispatch modes keep on the tape; once is enough."""
    assert [found["on the tape after a pause"] for found in ranks] == [0] * RANKS


@pytest.mark.parametrize("way", ["tensor", "sequence"])
def test_the_peak_is_predicted(ranks: list[dict[str, Any]], way: str) -> None:
    for found in ranks:
        # Predictions from real tensors add 1 KiB for what they cannot see, and gloo may free buffers of 2 KiB late in the
        # recorded step. Of 37 KiB.
        assert -5 * 1024 <= found[f"excess {way}"] <= 0


WHY_NOT = {
    "respread": "the gradients of a DTensor are spread in different ways before they are added up",
    "drawing": "it draws random numbers for DTensors",
}


@pytest.mark.parametrize("way", WHY_NOT)
def test_what_stays_on_the_tape_says_why(ranks: list[dict[str, Any]], way: str) -> None:
    for found in ranks:
        assert WHY_NOT[way] in found[f"why not {way}"]
        assert found[f"once {way}"]["same"]
        assert way == "drawing" or not found[f"once {way}"]["told"]
