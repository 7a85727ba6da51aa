"""Engines of others, asked over HTTP."""
