"""What a run keeps: checkpoints, its workdir, exports."""
