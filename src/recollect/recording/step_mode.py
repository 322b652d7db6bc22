"""The mode around a whole recorded step, which measures its ops."""

from typing import Any

import torch

from recollect._torch_private import current_autograd_node
from recollect.engine.facts import OpMode, facts_of
from recollect.recording.compiled_code import UnseenStorages


class StepMode(OpMode):
    """Sees every op of the step, below the tape, and runs it with the recorder's costs."""

    def __init__(self, unseen: UnseenStorages) -> None:
        super().__init__()
        self.recorder, self._unseen = unseen.recorder, unseen

    def run_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        recorder = self.recorder
        if recorder.is_recomputing or recorder.event_log.is_over or self.is_foreign():
            return func(*args, **kwargs)
        facts = facts_of(func)
        self._unseen.end_compiled()
        if func is torch.ops.aten.detach.default and current_autograd_node() >= 0:
            self._unseen.note_present(args[0])  # A parameter gets its gradient, which compiled code has made unseen.
        elif self._unseen.ran_compiled and current_autograd_node() >= 0:
            self._unseen.note_read((args, kwargs))
        if facts.is_view or facts.is_lazy:
            return func(*args, **kwargs)
        if recorder.reached is not None:
            recorder.reached.note()
        output, run = recorder.costs.run(func, facts, args, kwargs, may_repeat=recorder.current is not None)
        recorder.after_op(func, facts, args, kwargs, output, run)
        if recorder.ranks is not None:
            recorder.ranks.after_op(func, facts, args, kwargs, output)
        return output
