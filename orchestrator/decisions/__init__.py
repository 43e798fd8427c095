"""What happens next, and why. Belongs here: the Director, verdicts at rungs, rules that stop trials. Does not: how a trial is run or
shown. Loads neither Ray nor torch."""
