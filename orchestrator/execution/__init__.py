"""Where trials run: the only room that imports Ray. Belongs here: clusters, lanes and their ranks, what hands trials to them, and Ray
Tune. Does not: which trial to run, or when to stop one; the Director decides that."""
