"""The article's experiments in small: one script each, over one runner (`docs/training.md`)."""
