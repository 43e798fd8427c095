"""What is done before a run.

One real pass belongs here, the prediction of the peak memory, and compilation. What is done while a run trains does
not.
"""
