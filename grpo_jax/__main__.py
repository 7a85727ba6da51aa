"""`python -m grpo_jax` is `grpo-jax`."""

from grpo_jax.commands import main

if __name__ == '__main__':
  main.run()
