"""Builds a run: a config is resolved once, into specs and parts."""
