"""`batchscout init`: looks at a folder of Python files and writes a study file for what it finds there.

reading.py reads files, kinds.py says what the names in them are, subject.py chooses what to study, study_file.py writes it down, and
start.py puts these together. The files are parsed and never run.
"""
