"""What a run goes on from.

Saving and finding checkpoints belongs here, and knowing whose they are. How any file is written whole, and how damage
in it is found, does not.
"""
