"""What a run goes on from: saving and finding checkpoints, and knowing whose they are. How any file is written whole, and how damage in it is
found, is not here: files.py, checksums.py."""
