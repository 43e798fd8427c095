"""From micro-batches to new weights: the accumulated gradient, the optimizers and the learning rate, batches that grow, and the average of the
weights. What a step tells of its noise and its speed is in noise/ and speed/."""
