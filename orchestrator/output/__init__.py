"""What a person or a program reads of a study: terminal, report, recommendation, trackers, exports.

Functions of the study file and the journal's replay belong here. Decisions do not: nothing here changes a study.
"""
