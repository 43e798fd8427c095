"""What happens next, and why.

The Director belongs here, the verdicts at rungs, and the rules that stop trials. How a trial is run or shown does not.
Loads neither Ray nor torch.
"""
