"""Watches a step of a model as it is, without changing it."""
