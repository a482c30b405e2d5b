"""The backend-agnostic core: array API code that imports no array framework (NumPy is the reference)."""
