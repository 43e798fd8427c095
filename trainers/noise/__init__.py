"""What gradients and updates say of the noise in them.

What is measured in a step belongs here, what is estimated from it, and the file that keeps it. How a run stops for a
snapshot of its noise does not.
"""
