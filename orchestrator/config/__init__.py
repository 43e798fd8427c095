"""What a study file says, checked.

The keys belong here, with their documentation and defaults, what is said about a fault in them, and what they mean for
one trial. What a study has found does not, and nothing here runs. Loads neither Ray nor torch.
"""
