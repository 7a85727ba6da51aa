"""A server that speaks OpenAI's API, over a policy.

Read in this order:

- `wire`: what clients ask, read and checked, and how answers are written;
- `app`: the routes, over services; it knows nothing of models;
- `listening`: the app in a thread, on a socket.

It needs `pip install 'grpo_jax[server]'`.
"""
