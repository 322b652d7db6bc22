"""Copies values to host memory in forward, and back in backward."""
