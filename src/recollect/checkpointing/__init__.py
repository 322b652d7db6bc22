"""PyTorch's checkpointing API on the tape: functions, sequences, modules of a model, and policies per op."""
