"""The noise in gradients and updates: what is measured in a step, what is estimated from it, and the file that keeps it. How a run stops for
a snapshot of its noise is in reporting/."""
