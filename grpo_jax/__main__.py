"""`python -m grpo_jax` is `grpo-jax`."""

from grpo_jax import main

if __name__ == '__main__':
  main.run()
