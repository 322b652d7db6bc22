"""Training a Llama-style decoder within a memory budget: data, loop, checkpoints, displays."""
