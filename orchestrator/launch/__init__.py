"""A study as a job of a cluster's scheduler: what is submitted, and what the job runs on each of its nodes."""
