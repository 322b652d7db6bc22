"""Verify a plan on the real model: gradients bit for bit, peak and slowdown against their predictions."""
