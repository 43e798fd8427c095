"""How fast a run is.

The seconds and the FLOPs of a step belong here, the utilisation that they make, and the meter of a run. What the device
can compute, and what else the machine does, do not.
"""
