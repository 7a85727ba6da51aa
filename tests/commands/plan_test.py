"""`grpo-jax plan`: what is printed, and how it is asked."""

import dataclasses
import json

import pytest

from grpo_jax.commands import plan as command
from grpo_jax.planning import compiling
from grpo_jax.planning import topologies
from tests.cli import assert_refused
from tests.cli import call
from tests.compilations import compiled_programs
from tests.planning.estimates import SHAPES
from tests.planning.estimates import config
from tests.planning.estimates import estimate


def test_an_estimate_compiles_nothing():
  """So it takes seconds, most of which are the imports of the command."""
  with compiled_programs() as compiled:
    done = call(
      'plan',
      '--config=configs/plan.py:Qwen3-30B-A3B',
      '--topology=v5p:8x8x8',
      '--mesh=fsdp=8,expert=16,tensor=4',
      '--config.learner.micro_rows=128',
      '--config.learner.row_completions=1',
      '--estimate',
      '--json',
    )
  assert done.returncode == 0 and json.loads(done.stdout)['fits'], done.stderr
  # Optax makes a scalar for its count of steps.
  assert {*compiled} <= {'convert_element_type'}


def test_the_answer_is_the_same_for_a_person_and_a_program(capsys):
  made = estimate(**{'mesh.fsdp': 64})
  command.show(made, price=4.2)
  said = ' '.join(capsys.readouterr().out.split())
  found = command.to_json(made, price=4.2)
  assert json.loads(json.dumps(found)) == found
  assert f'Fits: {found["largest"]}' in said
  assert f'at least {found["bound_secs"]:.2f} s' in said
  assert f'cost {found["million_tokens_cost_at_least"]:.3g}' in said
  assert 'each call: results of collectives' in said
  assert 'sent at least' in said  # nothing was compiled
  for name, one in found['programs'].items():
    assert name in said
    assert one['total_gib'] == pytest.approx(sum(one['memory_gib'].values()))
    assert one['bound_secs'] == max(one['secs'].values())


@pytest.mark.parametrize('columns', [80, 60])
def test_a_plan_fits_the_terminal(capsys, monkeypatch, columns):
  """In a pipe it has 80 columns; what is too wide comes in parts."""
  monkeypatch.setenv('COLUMNS', str(columns))
  made = estimate(
    'v5e:4x4', slices=2, **{'mesh.tensor': 8, 'learner.batches': 2}
  )
  command.show(made, price=4.2)
  out = capsys.readouterr().out
  assert max(map(len, out.splitlines())) <= columns
  assert '\u2026' not in out  # nothing is cut off
  for name in ('score_all', 'DCN', 'at least', 'share'):
    assert f' {name} ' in out.replace('\n', ' '), name
  assert 'weights, and not 3.55.' in ' '.join(out.split())


def test_rows_that_are_parked_are_told(capsys):
  played = {
    'environment.name': 'any',
    'data.chat': True,
    'rewards': ({'name': 'environment'},),
    'sampler.max_rows': 64,
    'mesh.fsdp': 64,
  }
  command.show(estimate(**played))
  said = ' '.join(capsys.readouterr().out.split())
  # 448 rows of 1,024 tokens of a context.
  gib = 448 * 1024 * 2 * 2 * 4 * 128 * 28 / 2**30
  assert f'work take {gib:.2f} GiB of the memory of each host' in said
  command.show(estimate(**{'mesh.fsdp': 64}))
  assert 'Episodes' not in capsys.readouterr().out


def test_estimates_come_before_what_is_compiled(monkeypatch):
  def compile_all(requests, at_once=None, tell=None):
    print('THE COMPILER')
    return [compiling.Compiled(flops=1e12) for _ in requests]

  monkeypatch.setattr(compiling, 'compile_all', compile_all)
  monkeypatch.setattr(topologies, 'mesh', lambda *_: None)
  flags = '--config=configs/plan.py:Qwen2.5-0.5B', '--topology=v5litepod-8'
  done = call('plan', *flags, '--mesh=fsdp=8')
  assert done.returncode == 0, done.stderr
  first, _, second = done.stdout.partition('THE COMPILER\n')
  assert first.startswith('v5litepod-8 is v5e:2x4.\n')
  assert 'estimated by arithmetic\n' in first and 'Fits: ' in first
  assert second.startswith('\nCompiled\n') and 'estimated' not in second
  told = ' '.join(done.stderr.split())
  assert told.startswith('Now 5 programs are compiled for v5e:2x4: prepare, ')
  assert 'half a minute to ten minutes' in told
  done = call('plan', *flags, '--mesh=fsdp=8', '--json')  # one answer alone
  answer = json.loads(done.stdout.partition('THE COMPILER\n')[2])
  assert answer['programs']['decode']['compiled'] and answer['waste'] == []


def test_without_a_compiler_the_estimates_are_there(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  done = call(
    'plan', '--config=configs/plan.py:Qwen2.5-0.5B', '--topology=v6e-1'
  )
  assert done.returncode == 2 and ' train_step ' in done.stdout, done.stderr
  assert len(done.stderr.splitlines()) == 1
  assert "pip install 'grpo_jax[tpu]'" in done.stderr


def test_a_mesh_is_typed_as_the_config_has_it():
  changed = command.with_mesh(config(), 'fsdp=16,tensor=4', 2).mesh
  assert dataclasses.asdict(changed) == {
    'data': 1, 'fsdp': 16, 'tensor': 4, 'expert': 1, 'context': 1, 'slices': 2,
  }  # fmt: skip
  for wrong in ('fsdp', 'fsdp=x', 'rows=4', 'fsdp=4 tensor=2'):
    with pytest.raises(ValueError, match='--mesh='):
      command.with_mesh(config(), wrong, 1)


def test_slices_are_those_of_the_config_unless_others_are_given():
  two = config(**{'mesh.slices': 2})
  assert command.with_mesh(two, 'fsdp=16', None).mesh.slices == 2
  assert command.with_mesh(two, '', None) == two
  assert command.with_mesh(two, '', 4).mesh.slices == 4


@pytest.mark.parametrize(
  'flags, said',
  [
    (('--topology=v9:4x4',), 'v9'),
    ((), '--topology'),
    (('--topology=v5e:16x16', '--mesh=fsdp=16'), 'leaves 240 of the 256'),
    (('--topology=v5e:4x4', '--num_slices=0'), '--num_slices=0'),
    (('--topology=h100-sxm:8', '--mesh=fsdp=16'), 'needs 16 devices'),
    (('--against=nowhere',), 'no run in nowhere'),
  ],
)
def test_bad_input_gets_a_sentence(flags, said, tmp_path):
  file = tmp_path / 'planned.py'
  file.write_text(
    'from grpo_jax.config import default\n'
    'def get_config():\n'
    '  found = default()\n'
    f'  found.model.path = {str(SHAPES / "Qwen2.5-0.5B")!r}\n'
    "  found.data.tokenizer = ''\n"
    '  found.data.prompt_buckets = (64,)\n'
    '  found.warm_up.steps = 0\n'
    '  return found\n'
  )
  done = call('plan', f'--config={file}', *flags)
  assert_refused(done, said)
