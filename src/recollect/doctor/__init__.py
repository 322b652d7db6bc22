"""Name the problems of a training run from its traces: text, settings, or a snapshot of its memory."""
