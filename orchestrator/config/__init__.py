"""What a study file says, checked. Here are the keys, their documentation and defaults, what is said about a fault in
them, and what they mean for one trial. What a study has found is not here, and nothing here runs. Loads neither
Ray nor torch."""
