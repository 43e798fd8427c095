"""What is known of a study: values, and the disk they are on.

The journal belongs here, its events, the study that their replay gives, and the run directory. What to do next does
not. Loads neither Ray nor torch.
"""
