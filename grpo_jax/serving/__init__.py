"""A server that speaks OpenAI's API, over a policy.

Read in this order:

- `wire`: what clients ask, read and checked, and how answers are written;
- `app`: the routes, over services; it knows nothing of models;
- `listening`: the app in a thread, on a socket;
- `desk`: a thread that owns an engine, and draws for whoever asks;
- `reading`: what was drawn, as text, part by part;
- `answering`: a service over a desk, for `grpo-jax serve`;
- `episode`: the service of one episode, over its policy;
- `agents`: somebody's agent as an environment, with a server beside it.

It needs `pip install 'grpo_jax[server]'`.
"""
