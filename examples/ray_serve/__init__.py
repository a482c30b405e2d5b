"""The server as a Ray Serve deployment."""
