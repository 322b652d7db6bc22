"""Which schedule plays the calls of which engine: the one place where that of a new engine is entered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from recollect.plans.engines import EngineChoice, Region
from recollect.simulation.region_schedule import RegionSchedule
from recollect.simulation.schedule import Actions, PlayedStep, Schedule

__all__ = ["SCHEDULES", "with_schedules"]

SCHEDULES: Final[Mapping[type[EngineChoice], type[Schedule]]] = {Region: RegionSchedule}
"""Of the tape there is none: what it does is what the playback does by itself."""


def with_schedules(play: Actions, step: PlayedStep, engines: Mapping[int, EngineChoice]) -> Actions:
    """Return the actions of a playback with those of its calls' engines in place.

    Args:
        play: what to do on the tape.
        step: what is played.
        engines: of each call.
    """
    for engine, schedule in SCHEDULES.items():
        calls = [call for call, choice in engines.items() if type(choice) is engine]
        if calls:
            play = schedule(step, calls).actions(play)
    return play
