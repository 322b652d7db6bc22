"""Pictures of plans: PNG files with matplotlib, and an interactive page for a browser. Imports no torch."""
