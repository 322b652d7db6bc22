"""The record of a training step, as frozen data that needs no torch: what it computes and how it uses memory."""
