"""Compares the step under a plan with the plain one: gradients bit for bit, the peak with its prediction."""
