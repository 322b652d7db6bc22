"""Runs a planned step as a CUDA graph."""
