"""Jobs of their own that draw for a run; see `desk.py`."""
