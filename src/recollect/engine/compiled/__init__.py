"""Runs units inside `torch.compile`, which keeps the values that the plan keeps."""
