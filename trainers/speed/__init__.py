"""How fast a run is: the seconds and the FLOPs of a step, the utilisation that they make, and the meter of a run. What the device can compute,
and what else the machine does, is in device/."""
