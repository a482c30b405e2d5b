"""Lean decoders that read Hugging Face checkpoints, and a generic adapter over `transformers`."""
