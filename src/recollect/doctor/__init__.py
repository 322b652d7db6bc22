"""Name the problems of a training run from what it left: text, settings, or a memory snapshot."""
