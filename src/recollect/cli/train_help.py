"""What `recollect train --help` says before its many flags: how to begin, and the ten flags that matter most."""

from __future__ import annotations

__all__ = ["TRAIN_HELP"]

TRAIN_HELP = """\
Train a language model within a memory budget.

examples:
  recollect train --demo
  recollect train --data notes/ --memory-budget 60% --run-dir runs/notes
  recollect train --data notes/ --memory-budget 50% --run-dir runs/notes \\
      --resume --steps 400
  recollect train --num-layers 12 --hidden-size 768 --num-attention-heads 12 \\
      --recompute-granularity full --recompute-method uniform \\
      --recompute-num-layers 1     (Megatron's flags: docs/megatron_flags.md)

the ten flags that matter most:
  --demo                train the demo, about three minutes on two CPU cores
  --data PATH ...       text files, JSONL files or folders of them
  --size NAME           the model, such as tiny, demo, 160m or 1b
  --seq-length N        tokens per sequence
  --batch-size N        sequences per micro-batch
  --steps N             optimizer steps
  --learning-rate X     its highest value
  --memory-budget B     bound on the peak of the step, such as 16GiB or 60%
  --run-dir FOLDER      for checkpoints, plan and metrics
  --resume              go on from the newest checkpoint there

All flags, in groups:
"""
