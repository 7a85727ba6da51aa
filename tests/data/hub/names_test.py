"""What is a name of the Hub, and what is a path."""

import pytest

from grpo_jax import config
from grpo_jax import data
from grpo_jax.data import hub
from grpo_jax.run.build import data as build_data

COMMIT = 40 * 'a'


@pytest.mark.parametrize(
  'text, repository, revision, commit, file',
  [
    ('openai/gsm8k', 'openai/gsm8k', '', '', ''),
    ('hf:openai/gsm8k', 'openai/gsm8k', '', '', ''),
    ('hf://openai/gsm8k', 'openai/gsm8k', '', '', ''),
    ('hf://datasets/openai/gsm8k', 'openai/gsm8k', '', '', ''),
    ('hf://models/a/b@v1', 'a/b', 'v1', '', ''),
    ('hf://datasets/b', 'datasets/b', '', '', ''),
    ('Qwen/Qwen2.5-0.5B-Instruct@main', 'Qwen/Qwen2.5-0.5B-Instruct', 'main')
    + ('', ''),
    (f'a/b@{COMMIT}', 'a/b', '', COMMIT, ''),
    (f'a/b@refs/pr/3@{COMMIT}', 'a/b', 'refs/pr/3', COMMIT, ''),
    ('a/b:q4/c.gguf', 'a/b', '', '', 'q4/c.gguf'),
    (f'a/b@{COMMIT}:c.gguf', 'a/b', '', COMMIT, 'c.gguf'),
    ('hf://a/b.json', 'a/b.json', '', '', ''),
    ('hf:a/b.JSONL@v1', 'a/b.JSONL', 'v1', '', ''),
    (f'hf:a/b.parquet@{COMMIT}', 'a/b.parquet', '', COMMIT, ''),
  ],
)
def test_names(text, repository, revision, commit, file):
  found = hub.parse(text)
  assert found == hub.Name(repository, revision, commit, file)
  assert hub.parse(str(found)) == found


@pytest.mark.parametrize(
  'text',
  [
    '', 'a', 'arithmetic', './a/b', '/a/b', 'a/b/c', '~/a', 'a/', '/a', 'a//b',
    'a/b.jsonl', 'a/b.gguf', 'runs/x.parquet', 'a/b@', 'a/b:', 'a b/c', 'a/..',
    '-a/b', 'a/b-', 'a/b--c', f'a/{95 * "b"}', 'module:function', 'tfds:a/b',
    'package:llm', 'gs://bucket/folder', 'https://a/b', '<a list>', 'data/*',
    'ä/b', 'a/b\n',
  ],
)  # fmt: skip
def test_what_is_no_name(text):
  assert hub.parse(text) is None


def test_a_path_that_exists_wins(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert hub.parse('runs/first') is not None
  (tmp_path / 'runs' / 'first').mkdir(parents=True)
  assert hub.parse('runs/first') is None
  assert hub.parse('hf://runs/first') == hub.Name('runs/first')


@pytest.mark.parametrize('text', ['hf:', 'hf://a', 'hf://a/b/c', 'hf:a/b@'])
def test_what_says_that_it_is_one_must_be_one(text):
  with pytest.raises(ValueError, match='give hf://owner/name'):
    hub.parse(text)


@pytest.mark.parametrize(
  'text, name',
  [
    ('https://huggingface.co/Qwen/Qwen3-0.6B', 'Qwen/Qwen3-0.6B'),
    ('http://hf.co/Qwen/Qwen3-0.6B/', 'Qwen/Qwen3-0.6B'),
    ('huggingface.co/Qwen/Qwen3-0.6B', 'Qwen/Qwen3-0.6B'),
    ('https://huggingface.co/datasets/openai/gsm8k/viewer/main?row=3',)
    + ('openai/gsm8k',),
    ('https://huggingface.co/a/b/tree/v1', 'a/b@v1'),
    ('https://huggingface.co/a/b/blob/main/q4/c.gguf', 'a/b:q4/c.gguf'),
    ('https://mirror.org/a/b#files', 'a/b'),
    ('https://huggingface.co', 'owner/name'),
  ],
)
def test_the_address_of_a_page_is_refused_by_its_name(text, name, monkeypatch):
  monkeypatch.setenv('HF_ENDPOINT', 'https://mirror.org')
  for read in (hub.parse, data.local_model):
    with pytest.raises(ValueError, match=f"give the name there, '{name}'"):
      read(text)
  with pytest.raises(ValueError, match='give the name there'):
    build_data.open_source(config.Config(), text, 'train')


def test_an_address_of_another_kind_is_no_bucket():
  with pytest.raises(ValueError, match='give owner/name of .*, gs://bucket/f'):
    data.local_model('https://example.org/a/b')


def test_a_commit_is_added_and_shown_short():
  name = hub.Name('a/b', 'v1', '', 'c.gguf').pinned(COMMIT)
  assert str(name) == f'a/b@v1@{COMMIT}:c.gguf'
  assert name.at == COMMIT
  assert hub.short(str(name)) == 'a/b@v1@aaaaaaa:c.gguf'
  assert hub.short(f'a/b@{COMMIT} (3 %), x') == 'a/b@aaaaaaa (3 %), x'
