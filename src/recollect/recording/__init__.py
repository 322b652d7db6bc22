"""Record one training step of a model as a profile."""
