"""Runs units as two straight-line programs of the ops that autograd would run, written from a trace."""
