"""What a step does under a plan: its peak, its time, and what is alive when, played back from the profile."""
