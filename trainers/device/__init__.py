"""What a run computes on.

The device belongs here, what it can compute, how much of its memory a run may take, and what else the machine does
meanwhile. Models and data do not: nothing here knows them.
"""
