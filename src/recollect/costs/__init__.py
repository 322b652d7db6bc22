"""Seconds of an op: measured on a device, or modelled for fake tensors."""
