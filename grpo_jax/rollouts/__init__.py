"""Rollouts: sampled, judged, selected, written and measured."""
