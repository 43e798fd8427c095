"""A script that trains, run until its second optimizer step and looked at."""
