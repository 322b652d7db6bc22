"""Maps each engine to the schedule that plays its calls: the one place to register a new engine's schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from recollect.plans.engines import EngineChoice, Region
from recollect.simulation.region_schedule import RegionSchedule
from recollect.simulation.schedule import Actions, PlayedStep, Schedule

__all__ = ["SCHEDULES", "with_schedules"]

SCHEDULES: Final[Mapping[type[EngineChoice], type[Schedule]]] = {Region: RegionSchedule}
"""The tape has no entry: the playback itself plays it."""


def with_schedules(play: Actions, step: PlayedStep, engines: Mapping[int, EngineChoice]) -> Actions:
    """Return a playback's actions with those of its calls' engines in place.

    Args:
        play: the actions for calls on the tape.
        step: the step being played.
        engines: the engine of each call.
    """
    for engine, schedule in SCHEDULES.items():
        calls = [call for call, choice in engines.items() if type(choice) is engine]
        if calls:
            play = schedule(step, calls).actions(play)
    return play
