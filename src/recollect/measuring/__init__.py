"""Bytes and seconds of what runs: the peak of a callable, the workspace of an op, time on a device."""
