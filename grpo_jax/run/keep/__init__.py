"""What a run keeps: its workdir, checkpoints, words for what Python gave."""
