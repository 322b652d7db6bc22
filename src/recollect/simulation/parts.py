"""Simulates values of which each rank holds a part; `recollect.engine.sharded_keep` really holds them."""

from __future__ import annotations

from recollect.profile.graph import OpRecord
from recollect.replay import Value
from recollect.simulation.program import ProgramOp, rounded_bytes
from recollect.simulation.rerun import Rerun
from recollect.simulation.schedule import PlayedStep

__all__ = ["gather_of_part"]


def gather_of_part(step: PlayedStep, run: ProgramOp, value: int) -> tuple[Rerun, list[Value]]:
    """Return what gathers a value that an op has just computed, and its arguments: the bytes of this rank's part."""
    profile = step.profile
    key, nbytes = next(result for result in run.results if result[0][1] == value)
    part_bytes = -(-nbytes // profile.shard_ranks)
    whole_bytes = part_bytes * profile.shard_ranks
    time_s = profile.gather_latency_s + whole_bytes * profile.gather_s_per_byte
    op = OpRecord(f"{run.op.name}._c10d_functional:all_gather_into_tensor", (), (value,), time_s)
    size = rounded_bytes(profile, whole_bytes)
    part = Value(tensor=step.make(key, rounded_bytes(profile, part_bytes)))
    part.is_viewed = True
    return Rerun(step, ProgramOp(op, (), ((key, size),), (size,)), (size,)), [part]
