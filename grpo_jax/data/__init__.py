"""Prompts and tokenizers. This package imports no jax.

A *source* is a finite set of records: it has `__len__` and `__getitem__(int) ->
dict` and keeps no state. A source with a curriculum also has `drawn(index,
number)`; see `prompt_stream` and `stages`. A *stream* is an endless grain
dataset over sources, in random order.

How far a run has read its stream is a single integer, the global prompt
counter. `take(stream, position, count)` gives the same rows at any time and on
any process, so a run that is resumed needs this integer alone.

Sources of files check their records: all of small files when the source is
made, a sample of large ones, so that opening a million prompts takes a second
or two. Every record is checked again when it is read.

A chat may end with the assistant, as those for supervised fine-tuning do. This
turn is taken off the prompt, so that no model reads the answer there: it is the
answer of a record without one. Where `config.data.last_turn` is 'prefill', the
turn stays, and a completion goes on where it ends.

A `Tokenizer` comes from a Hugging Face folder, a GGUF file or a tokenizer.json.
It knows how a run writes its prompts (`PromptFormat`): as plain texts, or as
chats by the template of the model.

grain, tokenizers, jinja2, pyarrow, array_record and tensorflow_datasets are
imported inside the functions that need them, because they are slow to import.
"""

from grpo_jax.data._array_record import array_record_source
from grpo_jax.data._array_record import tfds_source
from grpo_jax.data._chat import ChatTemplate
from grpo_jax.data._chat import Prompt
from grpo_jax.data._chat import PromptFormat
from grpo_jax.data._chat import has_known_role
from grpo_jax.data._chat import is_by_assistant
from grpo_jax.data._chat import prompt_problem
from grpo_jax.data._chat import prompt_text
from grpo_jax.data._continuation import tool_call
from grpo_jax.data._files import cache_directory
from grpo_jax.data._files import files
from grpo_jax.data._files import fingerprint
from grpo_jax.data._files import format_of
from grpo_jax.data._files import is_pattern
from grpo_jax.data._gguf import gguf_metadata
from grpo_jax.data._jsonl import JsonlSource
from grpo_jax.data._jsonl import jsonl_source
from grpo_jax.data._models import local as local_model
from grpo_jax.data._named_tokenizer import EOS_TOKENS
from grpo_jax.data._named_tokenizer import tokenizer_from
from grpo_jax.data._parquet import arrow_source
from grpo_jax.data._parquet import parquet_source
from grpo_jax.data._prompts import MakeAhead
from grpo_jax.data._prompts import ReadAhead
from grpo_jax.data._prompts import epoch_rows
from grpo_jax.data._prompts import import_grain_alone
from grpo_jax.data._prompts import mixture
from grpo_jax.data._prompts import prompt_stream
from grpo_jax.data._prompts import take
from grpo_jax.data._prompts import take_fitting
from grpo_jax.data._reasoning_gym import ReasoningGymSource
from grpo_jax.data._reasoning_gym import reasoning_gym_source
from grpo_jax.data._records import MOST_CHECKED
from grpo_jax.data._records import FileSource
from grpo_jax.data._records import prompt_ids
from grpo_jax.data._records import row_at
from grpo_jax.data._records import row_name
from grpo_jax.data._records import some_places
from grpo_jax.data._save import is_in_folder
from grpo_jax.data._save import save_ends
from grpo_jax.data._save import save_tokenizer
from grpo_jax.data._tasks import ALPHABET
from grpo_jax.data._tasks import ArithmeticDemonstrations
from grpo_jax.data._tasks import ArithmeticSource
from grpo_jax.data._tasks import EpisodesSource
from grpo_jax.data._tasks import LargestSource
from grpo_jax.data._tasks import arithmetic_demonstrations
from grpo_jax.data._tokenizer import Tokenizer
from grpo_jax.data._tokenizer import character_tokenizer
from grpo_jax.data._tokenizer import check_vocab_size
from grpo_jax.data._views import Joined
from grpo_jax.data._views import Stage
from grpo_jax.data._views import WithoutLastTurns
from grpo_jax.data._views import stages
from grpo_jax.data._views import without_last_turn

__all__ = (
  'ALPHABET',
  'EOS_TOKENS',
  'MOST_CHECKED',
  'ArithmeticDemonstrations',
  'ArithmeticSource',
  'ChatTemplate',
  'FileSource',
  'Joined',
  'JsonlSource',
  'EpisodesSource',
  'LargestSource',
  'MakeAhead',
  'Prompt',
  'PromptFormat',
  'ReadAhead',
  'ReasoningGymSource',
  'Stage',
  'Tokenizer',
  'WithoutLastTurns',
  'arithmetic_demonstrations',
  'array_record_source',
  'arrow_source',
  'cache_directory',
  'character_tokenizer',
  'check_vocab_size',
  'epoch_rows',
  'files',
  'fingerprint',
  'format_of',
  'gguf_metadata',
  'has_known_role',
  'import_grain_alone',
  'is_by_assistant',
  'is_in_folder',
  'is_pattern',
  'jsonl_source',
  'local_model',
  'mixture',
  'parquet_source',
  'prompt_ids',
  'prompt_problem',
  'prompt_stream',
  'prompt_text',
  'reasoning_gym_source',
  'row_at',
  'row_name',
  'save_ends',
  'save_tokenizer',
  'some_places',
  'stages',
  'take',
  'take_fitting',
  'tfds_source',
  'tokenizer_from',
  'tool_call',
  'without_last_turn',
)
