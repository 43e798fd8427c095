"""What is done before a run: one real pass, the prediction of the peak memory, and compilation. Nothing here runs while a run trains."""
