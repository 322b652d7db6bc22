"""The performance harness: measure settings side by side and compare them with stored results."""
