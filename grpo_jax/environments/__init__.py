"""Environments: what a policy talks to, several turns long.

Read in this order:

- `base`: what a user writes, and what it is given;
- `forms`: what a user's function, class or tools become, and `playing`, which
  plays it; both run code of users by `threads`;
- `tools`: functions that a policy may call, and `schemas` of what these take;
- `formats`: how models write calls;
- `sessions`: where episodes run, here or in workers (`events` is what
  is said, `session` one episode, `stage` many in one event loop, `places` and
  `worker` where a stage runs);
- `adapters`: environments of other packages.

Nothing here knows of ids, tokenizers or devices: `episodes` plays.
"""
