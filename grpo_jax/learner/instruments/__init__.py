"""What is measured of the updates of a rollout, which do not change by it."""
