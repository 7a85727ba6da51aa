"""The commands `grpo-jax train`, `eval`, `sample`, `audit`, ..."""
