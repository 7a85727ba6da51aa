r"""A decoder-only transformer in NumPy float64, token by token.

It is written from what the families publish, not from `grpo_jax.models`, and
shares no code with it. Of the model it takes the names in the parameter tree
and the fields of the config. A sequence has no padding here.

  Llama 3      RMSNorm, RoPE with its scaling, grouped queries, SwiGLU
               (https://arxiv.org/abs/2407.21783)
  Mistral      sliding windows (https://arxiv.org/abs/2310.06825)
  Qwen 2, 3    biases of q, k, v; norms of q, k; experts
               (https://arxiv.org/abs/2407.10671, 2505.09388)
  Gemma 2, 3   GELU, soft caps, post norms, windows in some layers
               (https://arxiv.org/abs/2408.00118, 2503.19786)
  YaRN         https://arxiv.org/abs/2309.00071, equations 13, 15 and 25
  OLMo 2, 3    norms behind attention and MLP alone, one norm of all queries
               and one of all keys (https://arxiv.org/abs/2501.00656)
  Granite      factors of the residual stream, scores and logits
               (https://arxiv.org/abs/2408.13359, muP)
  SmolLM 3     layers without rotation (https://arxiv.org/abs/2501.18795)
  GLM 4        half of a head is rotated
  gpt-oss      sinks, clamped SwiGLU, biases of router and experts
               (https://arxiv.org/abs/2508.10925)
  DeepSeek V3  sigmoid scores, a correction of the choice, groups, an MLP that
               every token passes (https://arxiv.org/abs/2412.19437, 12 to 16)
  Gemma 4      values through a norm, proportional rotation, layers that read
               keys and values of others, inputs of each layer, an MLP beside
               experts, factors of the stream (transformers' gemma4)
  Llama 4      queries that grow with ln(1 + floor(position / trained))
"""

import math
from typing import Any

import numpy as np


def logits(config: Any, params: Any, tokens: Any, positions: Any) -> Any:
  """The logits behind every token of one sequence.

  Args:
    config: A `ModelConfig`.
    params: The tree that `Transformer.init` makes, as NumPy arrays.
    tokens: N ids.
    positions: N positions.

  Returns:
    f64[N,V].
  """
  stream = [
    config.embedding_scale * _wide(params['embedding'])[token]
    for token in tokens
  ]
  told = None
  if config.layer_inputs:
    told = _layer_inputs(config, params['inputs'], tokens, stream)
  known = {}  # keys and values, by window
  places = _places(config, params)
  for number in range(config.num_layers):
    kind = config.pattern[number % len(config.pattern)]
    weights = places[number]
    stream = _decoder_layer(config, kind, weights, stream, positions, known)
    if told is not None:
      stream = [
        x + _told(config, weights, x, y[number])
        for x, y in zip(stream, told, strict=True)
      ]
    if config.layer_scales:
      stream = [x * _wide(weights['layer_scale'])[0] for x in stream]
  scale = _wide(params['final_norm']['scale'])
  if config.tied_embeddings:
    output = _wide(params['embedding']).T
  else:
    output = _wide(params['head'])
  found = np.stack([_rms_norm(x, scale, config) @ output for x in stream])
  return _capped(found / config.logit_divisor, config.logit_cap)


def _wide(x):
  return np.asarray(x, np.float64)


def _places(config, params):
  """The weights of every layer; those of a kind are stacked by repetition.

  Layers that share keys and values are stacked by themselves, and the kinds of
  a stack are the shortest that repeat.
  """
  kinds = [
    config.pattern[n % len(config.pattern)] for n in range(config.num_layers)
  ]
  own = sum(not kind.shares_kv for kind in kinds)
  blocks, tail = iter(params['blocks']), iter(params.get('tail', []))
  found = []
  for part in kinds[:own], kinds[own:]:
    period = len(config.pattern)
    if own < len(kinds):
      period = next(n for n in range(1, len(part) + 1) if part[n:] == part[:-n])
    repeats = len(part) // period if part else 0
    stacked = [next(blocks) for _ in range(period)] if part else []
    found += [_pick(x, n) for n in range(repeats) for x in stacked]
    found += [next(tail) for _ in part[period * repeats :]]
  return found


def _pick(tree, repetition):
  if isinstance(tree, dict):
    return {name: _pick(branch, repetition) for name, branch in tree.items()}
  return tree[repetition]


def _layer_inputs(config, weights, tokens, stream):
  """Of every token what each layer is told: f64[L,size]."""
  shape = config.num_layers, config.layer_inputs
  size = config.layer_inputs
  found = []
  for token, x in zip(tokens, stream, strict=True):
    row = _wide(weights['input_table'])[token].reshape(shape) * math.sqrt(size)
    made = x @ _wide(weights['input_projection']) / math.sqrt(config.width)
    scale = weights['norm']['scale']
    made = [_rms_norm(y, scale, config) for y in made.reshape(shape)]
    found.append((np.stack(made) + row) / math.sqrt(2))
  return found


def _told(config, weights, x, y):
  inputs = weights['inputs']
  y = _gated(config, x @ _wide(inputs['input_gate']), y)
  y = y @ _wide(inputs['input_down'])
  return _rms_norm(y, weights['inputs_post_norm']['scale'], config)


def _decoder_layer(config, kind, weights, stream, positions, known):
  """h = x + attention(norm(x)), then h + mlp(norm(h)), for every token."""
  before = stream
  if config.pre_norms:
    scale = weights['attention_norm']['scale']
    before = [_rms_norm(x, scale, config) for x in stream]
  mixed = _attention(
    config, kind, weights['attention'], before, positions, known
  )
  if config.post_norms:
    scale = weights['attention_post_norm']['scale']
    mixed = [_rms_norm(x, scale, config) for x in mixed]
  factor = config.residual_scale
  stream = [x + factor * y for x, y in zip(stream, mixed, strict=True)]
  result = []
  for x in stream:
    y = x
    if config.pre_norms:
      y = _rms_norm(x, weights['mlp_norm']['scale'], config)
    if kind.experts and config.experts.beside_mlp:
      y = _beside(config, weights, x, y)
    elif kind.experts:
      z = _experts(config, weights['experts'], y)
      if config.experts.shared_width:
        z = z + _shared(config, weights['shared'], y)
      y = z
    else:
      y = _mlp(config, weights, y)
    if config.post_norms:
      y = _rms_norm(y, weights['mlp_post_norm']['scale'], config)
    result.append(x + factor * y)
  return result


def _mlp(config, weights, y):
  gate, up, down = (
    _adapted(config, weights['mlp'], name) for name in ('gate', 'up', 'down')
  )
  return _gated(config, y @ gate, y @ up) @ down


def _beside(config, weights, x, y):
  """The MLP of y and the experts of x, each behind a norm."""
  experts = weights['experts']
  scale = _wide(experts['input_scale']) / math.sqrt(config.width)
  told = _rms_norm(x, scale, config)
  z = _rms_norm(x, weights['experts_norm']['scale'], config)
  z = _experts(config, experts, z, told)
  return _rms_norm(
    z, weights['experts_post_norm']['scale'], config
  ) + _rms_norm(
    _mlp(config, weights, y), weights['dense_post_norm']['scale'], config
  )


def _rms_norm(x, scale, config):
  """x / sqrt(mean(x^2) + epsilon) * scale."""
  root = math.sqrt(sum(v * v for v in x) / len(x) + config.norm_epsilon)
  return x / root * _wide(scale)


def _gated(config, z, up):
  if config.activation == 'silu':
    return z * _sigmoid(z) * up
  if config.activation == 'clamped_swiglu':
    z = np.array([min(v, 7.0) for v in z])
    up = np.array([min(max(v, -7.0), 7.0) for v in up])
    return z * _sigmoid(1.702 * z) * (up + 1)
  inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
  return 0.5 * z * (1 + np.tanh(inner)) * up


def _sigmoid(z):
  return 1 / (1 + np.exp(-z))


def _capped(scores, cap):
  return scores if cap is None else cap * np.tanh(scores / cap)


def _adapted(config, weights, name):
  """W, or W + alpha / rank * A B where the weight has an adapter."""
  whole = _wide(weights[name])
  if name + '_a' not in weights:
    return whole
  a, b = _wide(weights[name + '_a']), _wide(weights[name + '_b'])
  return whole + config.lora.alpha / config.lora.rank * np.tensordot(a, b, 1)


def _attention(config, kind, weights, stream, positions, known):
  """Every token attends to itself and to those before it in its window."""
  query, output = (_adapted(config, weights, x) for x in ('query', 'output'))
  kv_heads = kind.num_kv_heads or config.num_kv_heads
  queries = []
  for x, position in zip(stream, positions, strict=True):
    q = [x @ query[:, h] for h in range(config.num_heads)]
    if config.qkv_bias:
      q = [a + b for a, b in zip(q, _wide(weights['query_bias']), strict=True)]
    if config.qk_norm:  # before the rotation
      q = _head_norms(config, weights['query_norm']['scale'], q)
    growth = _growth(config, kind, position)
    queries.append([growth * _turned(config, kind, a, position) for a in q])
  if not kind.shares_kv:
    known[kind.window_tokens] = _keys_and_values(
      config, kind, weights, stream, positions
    )
  keys, values = known[kind.window_tokens]
  scale = kind.attention_scale or config.attention_scale
  if scale is None:
    scale = 1 / math.sqrt(kind.head_dim or config.head_dim)
  sharing = config.num_heads // kv_heads
  mixed = []
  for n, of_token in enumerate(queries):
    y = np.zeros(config.width)
    for h, q in enumerate(of_token):
      seen = [
        m
        for m in range(n + 1)
        if kind.window_tokens is None
        or positions[n] - positions[m] < kind.window_tokens
      ]
      scores = np.array([scale * (q @ keys[m][h // sharing]) for m in seen])
      weight = np.exp(_capped(scores, config.attention_cap))
      drain = np.exp(_wide(weights['sinks'])[h]) if config.sinks else 0.0
      weight = weight / (weight.sum() + drain)
      head = sum(
        w * values[m][h // sharing] for w, m in zip(weight, seen, strict=True)
      )
      y = y + head @ output[h]
    if config.output_bias:
      y = y + _wide(weights['output_bias'])
    mixed.append(y)
  return mixed


def _keys_and_values(config, kind, weights, stream, positions):
  """Of every token, those of each head."""
  heads = kind.num_kv_heads or config.num_kv_heads
  key = value = _adapted(config, weights, 'key')
  if not kind.keys_as_values:
    value = _adapted(config, weights, 'value')
  keys, values = [], []
  for x, position in zip(stream, positions, strict=True):
    k = [x @ key[:, h] for h in range(heads)]
    v = [x @ value[:, h] for h in range(heads)]
    if config.qkv_bias:
      k = [a + b for a, b in zip(k, _wide(weights['key_bias']), strict=True)]
      v = [a + b for a, b in zip(v, _wide(weights['value_bias']), strict=True)]
    if config.qk_norm:
      k = _head_norms(config, weights['key_norm']['scale'], k)
    if config.value_norm:
      v = [_rms_norm(one, np.ones(len(one)), config) for one in v]
    keys.append([_turned(config, kind, a, position) for a in k])
    values.append(v)
  return keys, values


def _head_norms(config, scale, heads):
  """Each head through the norm, or all of them as one vector."""
  if not config.qk_norm_joint:
    return [_rms_norm(x, scale, config) for x in heads]
  joint = _rms_norm(np.concatenate(heads), scale, config)
  return np.split(joint, len(heads))


def _growth(config, kind, position):
  scaling = config.rope_scaling
  if scaling is None or not kind.rope_scaled or not scaling.query_growth:
    return 1.0
  beyond = math.floor(position / scaling.original_tokens)
  return 1 + scaling.query_growth * math.log(1 + beyond)


def _turned(config, kind, x, position):
  """Entries i and i + D/2 are a complex number, turned by position * theta_i.

  That is the form of Hugging Face's weights. YaRN multiplies the result.
  """
  size = int(len(x) * kind.rotated)
  if kind.proportional:  # only the fast pairs of the whole head are turned
    half = len(x) // 2
    turned = _turned_whole(config, kind, x, position)
    fast = np.arange(len(x)) % half < size // 2
    return np.where(fast, turned, x)
  if size < len(x):  # the first entries are a smaller head, which is turned
    rest = x[size:]
    if not size:
      return rest
    return np.concatenate(
      [_turned_whole(config, kind, x[:size], position), rest]
    )
  return _turned_whole(config, kind, x, position)


def _turned_whole(config, kind, x, position):
  half = len(x) // 2
  theta, factor = _angles(config, kind, len(x))
  pair = (x[:half] + 1j * x[half:]) * np.exp(1j * position * theta)
  return factor * np.concatenate([pair.real, pair.imag])


def _angles(config, kind, size):
  """Radians per position, f64[D/2], and the factor of queries and keys."""
  base = kind.rope_base or config.rope_base
  theta = np.array([base ** (-2 * i / size) for i in range(size // 2)])
  scaling = config.rope_scaling
  if scaling is None or not kind.rope_scaled:
    return theta, 1.0
  s, context = scaling.factor, scaling.original_tokens
  if scaling.kind == 'linear':
    return theta / s, 1.0
  if scaling.kind == 'llama3':
    low, high = scaling.low_factor, scaling.high_factor

    def of_llama(angle):
      wavelength = 2 * math.pi / angle
      if wavelength < context / high:
        return angle
      if wavelength > context / low:
        return angle / s
      smooth = (context / wavelength - low) / (high - low)
      return (1 - smooth) * angle / s + smooth * angle

    return np.array([of_llama(angle) for angle in theta]), 1.0

  # The index whose angle makes so many turns over the trained context.
  def dimension(turns):
    return (
      size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))
    )

  first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
  if scaling.truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, size - 1)
  ramp = np.clip((np.arange(size // 2) - first) / (last - first), 0, 1)
  factor = scaling.attention_factor
  if factor is None:
    factor = 0.1 * math.log(s) + 1
  return theta / s * ramp + theta * (1 - ramp), factor


def _experts(config, weights, x, told=None):
  """The k best experts, each with its weight."""
  described = config.experts
  scores = (x if told is None else told) @ _wide(weights['router'])
  if described.biases:
    scores = scores + _wide(weights['router_bias'])
  if described.scores == 'sigmoid':
    worth = _sigmoid(scores)
  else:
    worth = np.exp(scores - scores.max())
    worth = worth / worth.sum()
  liking = worth.copy()
  if described.corrected:
    liking = liking + _wide(weights['correction_bias'])
  size = described.number // described.groups
  groups = [range(g * size, (g + 1) * size) for g in range(described.groups)]
  if described.groups > 1:
    groups.sort(key=lambda g: -sum(sorted(liking[e] for e in g)[-2:]))
  open_to = [e for g in groups[: described.groups_per_token] for e in g]
  chosen = sorted(open_to, key=lambda e: -liking[e])[: described.per_token]
  total = sum(worth[e] for e in chosen) if described.normalized else 1.0
  y = np.zeros_like(x)
  for e in chosen:
    products = []
    hidden = None
    for name in ('gate', 'up', 'down'):
      product = (x if name != 'down' else hidden) @ _wide(weights[name][e])
      if described.biases:
        product = product + _wide(weights[f'{name}_bias'][e])
      products.append(product)
      if name == 'up':
        hidden = _gated(config, *products)
    weight = described.scale * worth[e] / total
    if described.beside_mlp:
      weight = weight * _wide(weights['output_scale'])[e]
    y = y + weight * products[2]
  return y


def _shared(config, weights, x):
  """The MLP that every token passes, perhaps behind a gate."""
  gate, up, down = (_wide(weights[name]) for name in ('gate', 'up', 'down'))
  y = _gated(config, x @ gate, x @ up) @ down
  if config.experts.shared_gate:
    y = _sigmoid(x @ _wide(weights['shared_gate'])) * y
  return y
