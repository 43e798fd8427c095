"""What is trained: the model and its loss, what users' own must return, what the backward pass keeps, and how several ranks hold one model.
The optimizer and the micro-batches of a step are in step/."""
