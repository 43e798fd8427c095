"""`batchscout doctor`: what will work on this machine, what will not, and how to mend it.

observe.py looks, checks.py and gpus.py judge what was seen, and told.py says it. Loads neither Ray nor torch: what happens when these are
imported is observed from outside, in a process of its own.
"""
