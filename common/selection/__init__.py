"""Length policies: how many tokens to verify."""
