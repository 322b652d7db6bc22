"""Defines plans, which say what happens to each value of each unit: as data, as text, and the names in them."""
