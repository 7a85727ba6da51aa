"""Environments: what a policy talks to, several turns long.

Read in this order:

- `base`: what a user writes, and what it is given;
- `tools`: functions that a policy may call;
- `formats`: how models write calls;
- `sessions`: where episodes run, in this process or in workers;
- `adapters`: environments of other packages.

Nothing here knows of ids, tokenizers or devices: `episodes` plays.
"""
