"""What a person or a program reads of a study: terminal, report, recommendation, trackers, exports. Belongs here: functions of the
study file and the journal's replay. Does not: decisions; nothing here changes a study."""
