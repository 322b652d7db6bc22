"""Costs of ops: measured on a device, or modelled for fake tensors."""
