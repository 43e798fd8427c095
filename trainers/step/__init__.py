"""From micro-batches to new weights.

The accumulated gradient belongs here, the optimizers and the learning rate, batches that grow, and the average of the
weights. What a step tells of its noise and its speed does not.
"""
