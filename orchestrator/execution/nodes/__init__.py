"""Which nodes there are, or may come, of which kind, and how many lanes they hold.

What runs on them, and how it is started and ended, does not belong here.
"""
