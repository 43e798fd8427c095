"""Where a study is kept, and who may write to it: folders and object stores, and one driver at a time.

Knows nothing of what is kept: neither events nor trials.
"""
