"""Runs units inside `torch.compile`, which keeps what the plan keeps."""
