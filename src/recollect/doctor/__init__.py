"""Name what went wrong in a training run, from what it left behind: text, settings, or a snapshot of its memory."""
