"""What an engine draws for prompts, judged, as a batch."""
