"""A step is divided into the work of one unit call at a time, in forward and in backward."""

from recollect.profile.events import BACKWARD
from recollect.simulation.windows import windows
from toy_profile import stack


def test_backward_goes_through_the_calls_from_the_last_to_the_first() -> None:
    profile = stack(3)
    paths = [profile.calls[window.call].path for window in windows(profile) if window.phase == BACKWARD]
    assert paths == ["head", "layers.2", "layers.1", "layers.0", "embed"]
