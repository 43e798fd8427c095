"""What a run computes on: the device, what it can compute, how much of its memory a run may take, and what else the machine does meanwhile.
Nothing here knows models or data."""
