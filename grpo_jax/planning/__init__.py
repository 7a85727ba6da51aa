"""Before a run is paid for: whether the machines are in order."""
