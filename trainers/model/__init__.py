"""What is trained.

The model belongs here, its loss, what users' models and losses must return, what the backward pass keeps, and how
several ranks hold one model. The optimizer and the micro-batches of a step do not.
"""
