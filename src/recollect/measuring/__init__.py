"""Measure bytes and seconds: the peak of a callable, the peak of each op, time on a device."""
