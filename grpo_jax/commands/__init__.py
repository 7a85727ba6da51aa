"""What is typed: `grpo-jax train`, `eval`, `sample`, `audit`, ..."""
