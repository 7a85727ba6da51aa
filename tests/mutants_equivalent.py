"""The mutants that no test can or should see; `tests.mutants` reads this."""

_MASKED = 'what it writes there is masked: nobody owns the place'
_COMPARED = (
  'only a comparison reads it, and that has no gradient; it saves work'
)
_MARGIN = 'any margin between rounding errors and real differences does'
_ZERO = 'an advantage of 0 makes the objective 0 on either side'
_SHAPES = 'only shapes are computed, and they do not depend on the key'

EQUIVALENT = {
  (
    'losses/_base.py:surrogate_loss',
    'value = jnp.where(batch.keep, terms.objective - terms.penalty, 0)',
    '0 -> 1',
  ): 'the weight is 0 there: any finite number does',
  (
    'losses/_weight.py:conflict_tokens',
    'length = jnp.max(jnp.where(batch.mask, position + 1, 0), axis=-1)',
    '0 -> 1',
  ): 'only an empty completion has it, which has no token to be in conflict',
  (
    'losses/_credit.py:drop_uniform_groups.keep',
    'return keep & ~_ops.uniform_groups(batch)[:, None, None]',
    'keep & ~_ops.uniform...h)[:, None, None] -> '
    '~_ops.uniform_groups...h)[:, None, None]',
  ): '`on_keep` itself joins the result with what was kept before',
  (
    'losses/_objective.py:gate_probability_change.objective',
    'now = jnp.exp(lax.stop_gradient(terms.logp))',
    'lax.stop_gradient(terms.logp) -> terms.logp',
  ): _COMPARED,
  (
    'losses/_objective.py:gate_binary_kl.objective',
    'logp, old = lax.stop_gradient(terms.logp), _ops.old_logp(terms, batch)',
    'lax.stop_gradient(terms.logp) -> terms.logp',
  ): _COMPARED,
  (
    'losses/_objective.py:gate_binary_kl.objective',
    'pushed = batch.advantage * (logp - old) > 0',
    'batch.advantage * (logp - old) -> batch.advantage / (logp - old)',
  ): 'a quotient has the sign of the product; over 0 the divergence is 0',
  (
    'losses/_objective.py:gate_binary_kl.objective',
    "return _gated(terms, pushed & (kl > bound), 'gated')",
    'kl > bound -> kl >= bound',
  ): 'differs where the rounded divergence is the threshold to the last bit',
  (
    'losses/_objective.py:mask_off_policy_negatives.objective',
    'gone = start - lax.stop_gradient(terms.logp)',
    'lax.stop_gradient(terms.logp) -> terms.logp',
  ): _COMPARED,
  (
    'losses/_objective.py:gamma_weighted_score.objective',
    'above = batch.advantage >= 0',
    'batch.advantage >= 0 -> batch.advantage > 0',
  ): _ZERO,
  (
    'losses/_objective.py:sigmoid_gate.objective',
    'tau = jnp.where(batch.advantage > 0, positive, negative)',
    'batch.advantage > 0 -> batch.advantage >= 0',
  ): _ZERO,
  (
    'losses/_ops.py:covariance',
    'logp, kept = lax.stop_gradient(terms.logp), batch.keep',
    'lax.stop_gradient(terms.logp) -> terms.logp',
  ): _COMPARED,
  (
    'losses/_ops.py:rank_descending',
    'rank = jnp.argsort(order, stable=True).reshape(value.shape)',
    'True -> False',
  ): '`order` is a permutation: no ties, so any sort is stable',
  (
    'losses/_penalty.py:_weighted',
    'ratio, gap = lax.stop_gradient((_ops.saturating_exp(log_ratio), gap))',
    'lax.stop_gradient((_...log_ratio), gap)) -> '
    '(_ops.saturating_exp(log_ratio), gap)',
  ): 'its slope is multiplied by `unmoved`, which is 0',
  (
    'losses/_penalty.py:penalize_covariance.penalty',
    'gap = moved * lax.stop_gradient(jnp.sign(moved))',
    'lax.stop_gradient(jnp.sign(moved)) -> jnp.sign(moved)',
  ): 'the slope of sign is 0 in JAX too; this says so',
  (
    'losses/_objective.py:average_ratio.log_ratio',
    'length = jnp.maximum(_ops.length(batch), 1).astype(own.dtype)',
    '1 -> 0',
  ): _MASKED,
  (
    'losses/_credit.py:keep_largest_advantages.keep',
    'size = jnp.round(_ops.safe_divide(size, largest), 5)',
    '5 -> 6',
  ): _MARGIN,
  (
    'losses/_credit.py:keep_largest_advantages.keep',
    'most = jnp.maximum(1, jnp.floor(share * number + 1e-4))',
    '0.0001 -> 0.00015',
  ): _MARGIN,
  (
    'losses/_credit.py:normalize_over_completions.advantage',
    'largest = jnp.where(counted, largest, 0)',
    '0 -> 1',
  ): _MASKED,
  (
    'losses/_weight.py:weigh_conflict_tokens.weight',
    'above = _ops.per_token(_ops.centered_reward(batch)) > 0',
    '_ops.per_token(_ops....eward(batch)) > 0 -> '
    '_ops.per_token(_ops....ward(batch)) >= 0',
  ): 'a completion whose centered reward is 0 is in no conflict',
}
"""(file:function, source line, change) -> why no test can or should see it."""
EQUIVALENT |= {
  (
    'learner/step.py:_optimizer_step',
    "sound['loss'] & sound['gradient'] & ~idle,",
    "sound['loss'] & sound['gradient'] -> sound['loss'] | sound['gradient']",
  ): 'it saves work: the update is refused anyway, and its first fault is told',
  (
    'learner/step.py:_optimizer_step',
    "sound['loss'] & sound['gradient'] & ~idle,",
    "sound['loss'] & sound['gradient'] -> sound['loss']",
  ): 'it saves work: the update is refused anyway, and its first fault is told',
  (
    'learner/step.py:_stays_finite',
    'pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)',
    'True -> False',
  ): 'both trees have one structure',
  (
    'learner/programs.py:lowerings',
    'chosen = next(updates.optimizer_batches(spec, prompts, 0))',
    '0 -> 1',
  ): 'the first epoch takes the prompts in their order, at any step',
  (
    'models/foreign.py:score',
    'forward_mode: bool = False,',
    'False -> True',
  ): 'it is not read; all models are scored by the same arguments',
  (
    'models/weights/writing.py:save',
    'shard_bytes: int = 5_000_000_000,',
    '5000000000 -> 5000000001',
  ): 'any number of about this size does; it bounds the size of a file',
  (
    'models/weights/tensors.py:parameters',
    'tree = jax.eval_shape(Transformer(plain).init, jax.random.key(0))',
    '0 -> 1',
  ): _SHAPES,
  (
    'rollouts/dynamic_sampling.py:to_json',
    "'surplus': surplus and parquet.to_bytes(surplus, 0),",
    '0 -> 1',
  ): 'the column `step` is for people; nobody reads that of a surplus',
  (
    'episodes/rollout.py:blank',
    'prompts=[[0] * prompt_tokens] * prompts,',
    '0 -> 1',
  ): 'only the shapes of a blank rollout are read',
  (
    'engines/local/sampler.py:Sampler.decode.body',
    'list(zip(rows.prompt_cache, rows.cache, strict=True)),',
    'True -> False',
  ): 'both have one cache for each layer',
  (
    'engines/local/sampler.py:Sampler.prefill',
    'last = jnp.take_along_axis(hidden, end[:, :, None], axis=1)[:, 0]',
    '0 -> 1',
  ): 'the axis has one place, and JAX reads the last for any beyond it',
  (
    'run/build/model.py:abstract',
    'shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))',
    '0 -> 1',
  ): _SHAPES,
  (
    'run/build/learner.py:_layout',
    'most_tokens, memory = 16384, 2**33',
    '16384 -> 16385',
  ): 'about so many tokens keep an accelerator busy; one more is as good',
  (
    'run/keep/checkpoint.py:Checkpoints.restore',
    "which = f'{tried}, the one before,' if bad > tried else f'{tried}'",
    'bad > tried -> bad >= tried',
  ): 'the checkpoint that was read is not among the bad ones',
  (
    'run/build/compiled_programs.py:_processor',
    'return hashlib.sha256(words.encode()).hexdigest()[:16]',
    '16 -> 17',
  ): 'any number of digits tells processors apart',
  (
    'run/build/placing.py:_lambda_source',
    'if len(found) > 1:',
    'len(found) > 1 -> len(found) >= 1',
  ): 'of a single lambda it finds that lambda; it saves work',
  (
    'run/watching.py:Refused.counted',
    'if sum(shares.values()) <= 0.999:',
    'sum(shares.values()) <= 0.999 -> sum(shares.values()) < 0.999',
  ): _MARGIN,
}
EQUIVALENT |= {
  (
    'models/attention.py:_over_prompts.portable',
    'used = place[None] < length[:, None]',
    'place[None] < length[:, None] -> place[None] <= length[:, None]',
  ): 'only what stands behind the prompt sees that key, and nobody reads it',
  (
    'models/experts.py:_mixed',
    "rows = copies.at[source].get(mode='fill', fill_value=0, "
    'unique_indices=True)',
    '0 -> 1',
  ): 'nobody reads a slot without a pair, forwards or backwards',
  (
    'models/layers.py:query_scale',
    'factor = 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else '
    '1.0',
    'scaling.factor > 1 -> scaling.factor >= 1',
  ): 'the logarithm of 1 is 0',
  (
    'models/kernels/rows.py:cudnn',
    'interpret: bool = False,',
    'False -> True',
  ): 'every caller gives it',
  (
    'models/kernels/rows.py:splash.local.run',
    'return lambda *given: jax.vmap(kernel(query.shape[2], first))(*given)',
    '2 -> 3',
  ): 'the masks of all heads are alike, and the kernel keeps one for all',
  (
    'models/weights/reading.py:_read',
    'entries = (*place.spec, *(None,) * len(parameter.shape))[int(stacked) :]',
    '(None,) * len(parameter.shape) -> (None,)',
  ): 'it decides on which devices a part is read, not what is read',
  (
    'models/weights/safetensors.py:Safetensors.read',
    'for axis, size in zip(columns, stored.shape[1:], strict=True)',
    'True -> False',
  ): 'an index has a slice for each axis',
  (
    'models/weights/writing.py:save',
    'if jax.process_count() > 1:',
    '1 -> 0',
  ): 'alone it is asked for arrays that nobody else waits for; it saves work',
  (
    'engines/local/generation.py:Generation._to_host',
    'if not self.shares:',
    'not self.shares -> self.shares',
  ): 'rows are shared by processes alone, whose tests are `long`',
  (
    'run/build/method.py:method_of',
    'if loss.requires <= known:',
    'loss.requires <= known -> loss.requires < known',
  ): 'no method requires all that is known',
  (
    'hosts/processes.py:Processes._wait_if_lost',
    'time.sleep(watch.SILENT_SECS + 5 * watch.BEAT_SECS)',
    '5 * watch.BEAT_SECS -> 5 / watch.BEAT_SECS',
  ): 'BEAT_SECS is 1; any wait that leaves the watch time to look does',
  (
    'hosts/watch.py:Watch._tell_silent',
    'if rank not in ended and now - since > secs:',
    'now - since > secs -> now - since >= secs',
  ): 'a clock of nanoseconds does not show the very limit',
  (
    'engines/local/prepare.py:Preparation.__init__',
    'if mesh is None or mesh.size == 1:',
    '1 -> 0',
  ): 'a mesh of one device takes the way of several, to the same weights',
  (
    'engines/local/lowered.py:programs',
    'rows = _regrouped(sampler, schedule, [first, more], joined, columns[-1])',
    '-1 -> 1',
  ): 'seen only with three widths and more rows after a joining than at first',
}
_EQUAL = 'return high - low <= 8 * jnp.finfo(value.dtype).eps * size'
_POWER = 'return jnp.clip(jnp.frexp(size)[1], -126, 126)'
_CANCELLED = 'jnp.abs(total) <= 8 * jnp.finfo(total.dtype).eps * size, 0, total'
EQUIVALENT |= {
  (f'losses/{where}', line, change): _MARGIN
  for where, line, change in (
    ('_ops.py:all_equal', _EQUAL, '8 -> 9'),
    ('_ops.py:_exponent', _POWER, '126 -> 127'),
    ('_ops.py:_exponent', _POWER, '126 -> 127 #2'),
    ('_credit.py:normalize_each_reward.advantage', _CANCELLED, '8 -> 9'),
    (
      '_credit.py:normalize_each_reward.advantage',
      _CANCELLED,
      'jnp.abs(total) <= 8 ...dtype).eps * size -> '
      'jnp.abs(total) < 8 *...dtype).eps * size',
    ),
  )
}
