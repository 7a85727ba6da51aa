"""What a run keeps: its workdir, checkpoints, and words for what Python gave."""
