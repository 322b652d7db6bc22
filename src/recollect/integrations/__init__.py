"""Settings of other libraries, as plans."""
