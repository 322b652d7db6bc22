"""Choose what to recompute: a profile and a budget go in, a plan comes out; nothing here imports torch."""
