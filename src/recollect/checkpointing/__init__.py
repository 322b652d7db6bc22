"""What PyTorch's own checkpointing offers, on the tape: functions, sequences, modules of a model, and policies per op."""
