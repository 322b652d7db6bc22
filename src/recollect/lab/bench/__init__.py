"""The performance harness: settings side by side, measured, and compared with what was measured before."""
