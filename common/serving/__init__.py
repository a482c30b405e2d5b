"""The server: an OpenAI-compatible endpoint over an engine of either runtime."""
