"""Static decoding: fixed shapes, fixed addresses, lengths on the device, so that a round can be captured in a graph."""
