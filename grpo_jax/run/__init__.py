"""One run: built, begun or gone on with, saved, stopped."""
