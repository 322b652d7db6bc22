"""Watches a step of a model without changing it."""
