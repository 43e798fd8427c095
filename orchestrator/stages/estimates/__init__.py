"""What trials say: who ends lowest, who is fastest, how noisy a gradient is, and how sure each of it is.

Pure numbers from trials that have run belong here, for all stages, and what another run would be worth (`next_run.py`). What a stage
proposes does not belong here, nor anything that knows of a stage.
"""
