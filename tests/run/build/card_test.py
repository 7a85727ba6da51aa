"""The card of a model: what it tells, and what it does not."""

import json
import re

from grpo_jax import config as config_lib
from grpo_jax.run.build import card
from grpo_jax.run.keep import metrics_file

TO = 'me/sums'
SECRET = 'made-of-my-own'
LINES = [
  {
    'step': step,
    'reward': step / 8,
    'heldout_accuracy': share,
    'heldout_judged': share and 100.0,
  }
  for step, share in ((0, 0.25), (1, None), (2, 0.5), (4, 0.75))
]


def written(folder, step, adapter=False, lines=LINES, **changes):
  """The card of a run with such a config and such metrics."""
  values = {
    'model.path': 'lab/tiny@' + 40 * 'a',
    'data.train': (
      {'name': f'lab/sums@{40 * "b"}'},
      {'name': 'clients/bank'},
      {'name': f'/home/{SECRET}/a.jsonl'},
    ),
    'data.tokenizer': '',
    'rewards': (
      {'name': f'{SECRET.replace("-", "_")}.judge:score', 'weight': 1.0},
    ),
    'data.chat': True,
    'data.system_prompt': SECRET,
    'evaluation.examples': 100,
    **changes,
  }
  config = config_lib.default()
  config.update_from_flattened_dict(values)
  file = folder / 'metrics.jsonl'
  file.write_text('\n'.join(map(json.dumps, lines)))
  measured = metrics_file.read(file)
  card.write(folder, TO, config_lib.resolve(config), measured, step, adapter)
  return (folder / 'README.md').read_text()


def test_it_says_what_was_learned_and_nothing_private(tmp_path):
  text = written(tmp_path, 4, adapter=True)
  for words in (
    'base_model: lab/tiny\n',
    'library_name: peft\n',
    'datasets:\n- lab/sums\n',
    'after 4 rollouts',
    '| prompts | lab/sums, data of its owner, data of its owner |',
    '| rewards | a function of its owner |',
    '| method | grpo |',
    '| advantage | (r - mean)/std |',
    '| 0 | 100 | 0.250 | 0.175 to 0.343 |',
    '| 4 | 100 | 0.750 | 0.657 to 0.825 |',
    f'![Learning curve]({card.CURVE})',
  ):
    assert words in text, (words, text)
  assert SECRET not in text and str(tmp_path) not in text
  assert 'clients' not in text
  assert not re.search(r'made.of.my.own', text)
  assert (tmp_path / card.CURVE).read_bytes()[1:4] == b'PNG'
  # Of an earlier checkpoint, what was measured until then.
  text = written(tmp_path, 2)
  assert '| 2 | 100 | 0.500 |' in text and '0.750' not in text
  assert 'library_name: transformers' in text


def test_a_run_without_figures(tmp_path):
  text = written(tmp_path, 0, lines=(), **{'model.path': f'/home/{SECRET}'})
  assert 'a model of its owner' in text and 'base_model' not in text
  assert SECRET not in text and card.CURVE not in text


def test_no_file_of_the_model_names_a_path(tmp_path):
  files = {
    'adapter_config.json': {
      'base_model_name_or_path': f'/home/{SECRET}',
      'r': 2,
    },
    'tokenizer_config.json': {'name_or_path': f'/home/{SECRET}'},
  }
  for name, described in files.items():
    (tmp_path / name).write_text(json.dumps(described))
  written(tmp_path, 4, adapter=True)
  assert SECRET not in ''.join(x.read_text() for x in tmp_path.glob('*.json'))
  found = json.loads((tmp_path / 'adapter_config.json').read_text())
  assert found == {'base_model_name_or_path': 'lab/tiny', 'r': 2}
