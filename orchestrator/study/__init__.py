"""What is known of a study: values, and the disk they are on. Belongs here: the journal, its events, the study that their replay gives,
and the run directory. Does not: what to do next. Loads neither Ray nor torch."""
