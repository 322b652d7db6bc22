"""Carries out a plan on a running model: the tape (per value) and the region engine (per module)."""
