"""One operation, several backends, one float64 reference: the table behind `dspine parity` and `tests/parity`."""
