"""Our engine: compiled programs, and the loop that calls them."""
