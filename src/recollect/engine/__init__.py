"""Carries out plans on a running model, with two engines: the tape (per value) and the region engine (per module)."""
