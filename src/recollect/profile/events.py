"""The events of a recorded step, as small tuples of ints: what `planning.simulate` plays back.

A value of a unit call is `(call, value)`; any other storage (embeddings, logits, gradients, optimizer temporaries) has a
number of its own. "Dies" means that nothing outside of the tape refers to the storage any more.

| event | means |
|---|---|
| `(ALLOC, storage, nbytes)` | a storage outside of the unit calls' forward was made |
| `(FREE, storage)` | it died |
| `(WORK, run)` | an op outside of the units' forward runs; in a profile `(WORK, nbytes, time_ns)`: what it works in, its time |
| `(SUM, storage, addend, nbytes)` | autograd added a gradient to an earlier one, in a new storage |
| `(OP, call, op)` | an op of a unit's forward ran: its results were made |
| `(DIES, call, value)` | the storage of a value died |
| `(SAVE, call, value, handle, saver)` | autograd saved a value while call `saver` ran |
| `(USE, handle)` | backward asked for what it saved |
| `(RELEASE, handle)` | backward, or a graph that was thrown away, let go of it |
| `(RETURN, call)` | a unit's forward returned |
| `(PHASE, phase)` | forward, backward or the optimizer step begins |
"""

from __future__ import annotations

from typing import Final

ALLOC: Final = 0
FREE: Final = 1
OP: Final = 2
DIES: Final = 3
SAVE: Final = 4
USE: Final = 5
RELEASE: Final = 6
RETURN: Final = 7
PHASE: Final = 8
WORK: Final = 9
SUM: Final = 10

FORWARD: Final = 0
BACKWARD: Final = 1
OPTIMIZER: Final = 2

PHASE_NAMES: Final = ("forward", "backward", "optimizer step")
