"""`python -m grpo_jax` is `grpo-jax`."""

from grpo_jax import main

main.run()
