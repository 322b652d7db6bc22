"""Pictures of what is planned: PNG by matplotlib, and a page for a browser. Imports no torch."""
