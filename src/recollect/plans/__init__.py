"""Defines plans, which set the action for each value of each unit: as data, as text, and the names in them."""
