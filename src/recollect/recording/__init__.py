"""Watches one training step of a model and writes its profile."""
