"""What a study file says, checked. Belongs here: keys, their documentation, defaults and faults, and what keys mean for one trial.
Does not: what a study has found, and anything that runs. Loads neither Ray nor torch."""
