"""Attach recollect to a training loop: record its first step, plan, and watch later steps."""
