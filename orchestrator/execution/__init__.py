"""Where trials run: the only room that imports Ray.

Clusters belong here, lanes and their ranks, what hands trials to them, and Ray Tune. Which trial to run, and when to
stop one, does not: the Director decides that.
"""
