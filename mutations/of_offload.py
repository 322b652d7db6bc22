"""Faults of copies to host memory and back; the rules are those of `engine/offload/carriers.py`."""

from __future__ import annotations

from mutations.mutation import Mutation

__all__ = ["MUTATIONS"]

_OFFLOAD = "engine/offload"

MUTATIONS = (
    Mutation(
        "nested-sent-away",
        "host memory is planned for nested tensors, which the tape holds itself",
        "recording/recording_tape.py",
        (("            self.recorder.keep([tensor])  # The tape", "            pass  # The tape"),),
    ),
    Mutation(
        "slots-in-blocks-of-the-device",
        "values take as much host memory as they take of the device, in whole blocks",
        "simulation/playback.py",
        (("values[value].nbytes, token, again", "token.nbytes, token, again"),),
    ),
    Mutation(
        "copies-have-time-of-all-micro-steps",
        "copies have the time of all equal micro-steps, of which one is stored",
        "simulation/copy_clock.py",
        (("step_s / playback.of_all_s", "step_s / playback.clock_s"),),
    ),
    Mutation(
        "offloaded-on-one-clock",
        "plans with host memory add the host's seconds to the device's, where that runs behind it",
        "planning/planners.py",
        (("ClockedOffloadPlanner if has_two_clocks(profile) else OffloadPlanner", "OffloadPlanner"),),
    ),
    Mutation(
        "copy-begins-at-once",
        "copies begin before the value, or the room for it, is there: rules 1 and 3",
        _OFFLOAD,
        (("        lane.wait_event(home.record_event())\n", ""),),
    ),
    Mutation(
        "leaves-while-copied",
        "a value leaves the device while it is copied out: rule 2",
        _OFFLOAD,
        (("self._host.wait(self._out)", "pass"),),
    ),
    Mutation(
        "used-while-it-comes-back",
        "a value is used before it is back: rule 4",
        _OFFLOAD,
        (("self._host.wait(self._back)", "pass"),),
    ),
    Mutation(
        "slot-written-while-read",
        "a slot is written to while the last value comes back out of it: rule 5",
        _OFFLOAD,
        (("    return [ticket for *_, tickets in overlapping for ticket in tickets]", "    return []"),),
    ),
    Mutation(
        "freed-while-copied",
        "a value that nobody needs is freed while it is copied, out or back: rules 6 and 7",
        _OFFLOAD,
        (("self._host.carrier.wait(ticket)", "pass"),),
    ),
    Mutation(
        "back-before-out",
        "a copy back begins before the copy out is over: rule 8",
        _OFFLOAD,
        (("slot.copies = [self._out]", "slot.copies = []"),),
    ),
    Mutation(
        "home-does-not-wait",
        "the stream that memory goes back to does not wait for the copy of another one",
        _OFFLOAD,
        (("            ticket.home.wait_event(ticket.end)\n", "            pass\n"),),
    ),
    Mutation(
        "failed-copy-poisons-slot",
        "a copy into a slot fails because an earlier one out of it did",
        _OFFLOAD,
        (("    wait(after)\n", "    for ticket in after:\n        ticket.result()\n"),),
    ),
    Mutation(
        "bytes-allocated-in-worker",
        "bytes for a copy back are allocated in another thread, where nobody counts them",
        _OFFLOAD,
        (
            (
                "arriving = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)",
                "from concurrent.futures import ThreadPoolExecutor\n"
                "            with ThreadPoolExecutor(1) as worker:\n"
                "                arriving = worker.submit(torch.empty, self._nbytes, dtype=torch.uint8).result()",
            ),
        ),
    ),
    Mutation(
        "comes-back-for-one-backward",
        "what the backward of a different graph has brought back is gone after one that keeps its graph",
        _OFFLOAD,
        (("if self._slot is not None or not keeps_graph():", "if True:"),),
    ),
    Mutation(
        "change-not-seen-when-asked-early",
        "a value that was written to out of sight is handed out while it is still on the device",
        _OFFLOAD,
        (
            (
                "            self._look_for_changes(tensor)\n        if self._problem",
                "            pass\n        if self._problem",
            ),
        ),
    ),
    Mutation(
        "written-while-copied-out",
        "an op that writes in place does not wait for the copy out",
        "engine",
        (("            settle(storages, is_raised=is_raised)\n", "            pass\n"),),
    ),
    Mutation(
        "bytes-held-by-themselves",
        "a value on the device that nobody needs any more stays there",
        _OFFLOAD,
        (("        if not self._num_marks and not self.is_running:\n", "        if False:\n"),),
    ),
    Mutation(
        "flight-without-end",
        "loops that never go backward collect what they offload",
        _OFFLOAD,
        (("(self._flight.is_over and not is_inside)", "False"),),
    ),
    Mutation(
        "filled-by-others-offloaded",
        "room for others to fill is said to be offloaded, which it is not",
        "simulation",
        (("is_result or value.stays or not value.nbytes", "is_result or not value.nbytes"),),
    ),
    Mutation(
        "out-while-nothing-runs-again",
        "the bound gives copies out the time of recompute before there is any",
        "planning",
        (
            (
                "per_recompute=np.concatenate((out * has_rerun,",
                "per_recompute=np.concatenate((np.full(num_moments, out),",
            ),
        ),
    ),
    Mutation(
        "return-is-no-edge",
        "what is to leave after the last unit stays until backward",
        "engine",
        (("place[0].end_call(place[1])", "pass"),),
    ),
    Mutation(
        "copy-does-not-wait",
        "a copy to or from host memory begins before those that it has to come after have ended",
        "engine/offload",
        (("    wait(after)\n    ctypes.memmove", "    ctypes.memmove"),),
    ),
)
