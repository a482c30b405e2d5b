"""Training of drafters (`algorithms` 1): data, losses, schedules, loop."""
