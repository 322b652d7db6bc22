"""The record of a training step's computation and memory, as frozen data that needs no torch."""
