"""Predicts a step under a plan by playing its profile back: the peak, the time, and what is alive when."""
