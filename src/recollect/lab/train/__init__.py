"""Train a language model within a memory budget: data, loop, checkpoints, displays."""
