"""launch/slurm.sbatch, with stand-ins for Slurm's commands and for grpo-jax."""

import pytest

from tests.launch import scripts

# Runs the tasks one after another; the highest code is its own, as srun's is.
SRUN = """
while [[ $1 == --* ]]; do echo "srun $1" >>"$NOTES"; shift; done
highest=0 rank=0
for does in $TASKS; do
  code=0
  DOES=$does SLURM_PROCID=$rank "$@" || code=$?
  [ $code -le $highest ] || highest=$code
  rank=$((rank + 1))
done
if [ -n "${ASKS:-}" ]; then
  kill -TERM "$(cat "$NOTES.script")"
  until [ -e "$NOTES.cancelled" ]; do sleep 0.02; done
fi
exit $highest
"""
GRPO_JAX = """
echo "grpo-jax $*; devices ${JAX_LOCAL_DEVICE_IDS:-}" >>"$NOTES"
[ "$DOES" != killed ] || kill -KILL $$
exit $DOES
"""
# Its program saves for a while after SIGTERM, which Slurm sends to each process
# of a task.
SRUN_OF_A_LIMIT = """
while [[ $1 == --* ]]; do shift; done
setsid "$@" &
until [ -e "$NOTES.ready" ]; do sleep 0.02; done
kill -TERM -- -$!
code=0
wait $! || code=$?
echo 'the task has ended' >>"$NOTES"
exit $code
"""
SAVES = """
trap 'sleep 0.3; echo saved >>"$NOTES"; exit 143' TERM
touch "$NOTES.ready"
while true; do sleep 0.02; done
"""


@pytest.fixture
def submit(tmp_path):
  """Runs the script as Slurm does; its exit code, and what was noted."""
  programs, notes = tmp_path / 'bin', tmp_path / 'notes'
  stand_ins = {
    'srun': SRUN,
    'grpo-jax': GRPO_JAX,
    'scontrol': 'echo "scontrol $*" >>"$NOTES"',
    'squeue': 'echo "${STATE:-RUNNING}"',
    # It takes its time: the tasks have ended before it has.
    'scancel': (
      'echo "scancel $*" >>"$NOTES"; touch "$NOTES.cancelled"; sleep 0.3'
    ),
  }

  def run(tasks='', programs_too=(), launch=scripts.LAUNCH, **variables):
    arguments = variables.pop('ARGUMENTS', '--config="a b"')
    for name, text in {**stand_ins, **dict(programs_too)}.items():
      scripts.stand_in(programs, name, text)
    # A copy elsewhere, in the folder where sbatch was called.
    script = tmp_path / 'slurm_script'
    script.write_text((scripts.LAUNCH / 'slurm.sbatch').read_text())
    done = scripts.run(
      'bash', '-c',
      f'cd {tmp_path} && echo $$ >notes.script && '
      f'exec bash slurm_script train {arguments}',
      programs=programs,
      NOTES=notes,
      TASKS=tasks,
      LAUNCH=launch,
      SLURM_JOB_ID=7,
      SLURM_SUBMIT_DIR=tmp_path,
      **variables,
    )  # fmt: skip
    told = notes.read_text().splitlines() if notes.exists() else []
    return done, told

  return run


AGAIN = 'scontrol requeue 7'


@pytest.mark.parametrize(
  'tasks, code, again',
  [
    ('0 0', 0, False),
    ('75 75', 75, True),
    ('0 75', 75, True),
    ('killed 75', 137, True),
    ('143 143', 143, True),  # by the time limit
    ('2 75', 2, False),
    ('killed 2', 2, False),
    ('1 137', 2, False),
  ],
)
def test_goes_into_the_queue_after_these_codes(submit, tasks, code, again):
  done, told = submit(tasks)
  assert done.returncode == code, done.stderr
  assert told.count(AGAIN) == again
  assert 'srun --kill-on-bad-exit=0' in told and 'srun --wait=90' in told
  assert told.count('grpo-jax train --config=a b; devices ') == 2


@pytest.mark.parametrize(
  'tasks, variables',
  [
    ('143 143', {'ASKS': 1}),  # scancel --signal=TERM --batch
    ('75 75', {'ASKS': 1}),
    ('143 143', {'STATE': 'COMPLETING'}),  # taken, or cancelled, by Slurm
    ('75 75', {'MAX_RESTARTS': 0}),
  ],
)
def test_stays_out_of_the_queue(submit, tasks, variables):
  done, told = submit(tasks, **variables)
  assert done.returncode == int(tasks.split()[0]), done.stderr
  assert AGAIN not in told and told
  # Whoever asks the script asks all tasks, which alone can save.
  assert ('scancel --signal=TERM 7' in told) == ('ASKS' in variables)


def test_new_starts_are_limited(submit):
  for times in 1, 2, 2:
    _, told = submit('75 75', MAX_RESTARTS=2)
    assert told.count(AGAIN) == times


@pytest.mark.parametrize('value', ['many', '-1', '08'])
def test_a_limit_that_is_no_number_is_refused(submit, value):
  done, told = submit('75', MAX_RESTARTS=value)
  assert done.returncode == 2 and not told
  assert f'MAX_RESTARTS={value}; give a whole number' in done.stderr


def test_a_process_has_the_time_to_save(submit):
  replaced = {'srun': SRUN_OF_A_LIMIT, 'grpo-jax': SAVES}
  done, told = submit(programs_too=replaced)
  assert done.returncode == 143
  assert told == ['saved', 'the task has ended', AGAIN]


def test_a_folder_of_ones_own_is_copied_once(submit, tmp_path):
  own = tmp_path / 'lab'
  own.mkdir()
  (own / 'config.py').write_text('first')
  copy = tmp_path / 'slurm-7.code' / 'lab' / 'config.py'
  for text in 'first', 'second':  # which a job that goes on does not see
    (own / 'config.py').write_text(text)
    _, told = submit('0', CODE='lab', ARGUMENTS='--config=lab/config.py')
    assert told[-1].startswith(f'grpo-jax train --config={copy}; ')
    assert copy.read_text() == 'first'


def test_a_config_is_read_from_the_copy_however_it_is_typed(submit, tmp_path):
  """And the folder may be a link to one elsewhere, of another name."""
  own = tmp_path / 'far' / 'real'
  (own / 'deep').mkdir(parents=True)
  for name in 'config.py', 'deep/config.py', '.env':
    (own / name).write_text('')
  (tmp_path / 'lab').symlink_to(own)
  copy = tmp_path / 'slurm-7.code' / 'lab'
  for typed, name in {
    '--config=lab/config.py': '=config.py',
    '--config lab/config.py': ' config.py',
    '--config=./lab/config.py': '=config.py',
    f'--config={tmp_path}/lab/deep/config.py': '=deep/config.py',
    f'--config={own}/config.py': '=config.py',
    '--config=far/../lab/deep/config.py': '=deep/config.py',
    '--config=lab/gone/config.py': '=gone/config.py',
  }.items():
    _, told = submit('0', CODE='lab', ARGUMENTS=typed)
    given = told[-1].partition('; ')[0]
    assert given == f'grpo-jax train --config{name[0]}{copy}/{name[1:]}', typed
  assert {x.name for x in copy.iterdir()} == {'config.py', 'deep'}
  _, told = submit('0', CODE='lab', ARGUMENTS='--config=other/lab/config.py')
  assert '--config=other/lab/config.py' in told[-1]


def test_a_commit_of_a_folder_is_copied(submit, tmp_path):
  own = tmp_path / 'lab'
  own.mkdir()
  (own / 'config.py').write_text('first')
  made = scripts.run(
    'bash', '-euc',
    'cd "$0"; git init -q; git add .; '
    'git -c user.name=a -c user.email=b commit -qm c; git tag v1',
    own,
  )  # fmt: skip
  assert made.returncode == 0, made.stderr
  (own / 'config.py').write_text('second')
  submit('0', CODE='lab', CODE_REVISION='v1')
  copy = tmp_path / 'slurm-7.code' / 'lab' / 'config.py'
  assert copy.read_text() == 'first'


@pytest.mark.parametrize(
  'variables, words',
  [
    ({'NEEDS': 'HOME,NOT_SET_HERE'}, 'NEEDS has a name that is not set'),
    ({'CODE': 'nowhere'}, 'CODE=nowhere is no folder'),
    ({'CODE': '.', 'CODE_REVISION': 'v9'}, 'git'),
    ({'CODE_REVISION': 'v9'}, 'v9 is a commit of the folder CODE; give both'),
  ],
)
def test_what_a_job_lacks_is_told_before_it_begins(submit, variables, words):
  done, told = submit('0', **variables)
  assert done.returncode and words in done.stderr and not told


def test_a_process_has_all_gpus_of_its_node(submit):
  _, told = submit('0', SLURM_GPUS_ON_NODE=4)
  assert told[-1].endswith('devices 0,1,2,3')


def test_a_folder_without_the_rules_is_named(submit, tmp_path):
  done, told = submit('0', launch=tmp_path / 'none')
  assert done.returncode == 2 and 'call sbatch in the root of' in done.stderr
  assert not told


def test_slurm_is_told_what_the_run_needs():
  text = (scripts.LAUNCH / 'slurm.sbatch').read_text()
  before, _, _ = text.partition('set -euo')  # Slurm reads no further
  for wanted in (
    '--signal=TERM@300',
    '--requeue',
    '--ntasks-per-node=1',
    '--open-mode=append',
  ):
    assert f'#SBATCH {wanted}\n' in before


@pytest.mark.parametrize('given', [{}, {'SLURM_JOB_ID': ''}])
def test_outside_of_a_job_it_says_so(given, tmp_path):
  scripts.stand_in(tmp_path, 'srun', SRUN)
  done = scripts.run(
    'bash', scripts.LAUNCH / 'slurm.sbatch', 'train', programs=tmp_path, **given
  )
  assert done.returncode == 2
  assert 'this is no job of Slurm' in done.stderr
  assert 'sbatch launch/slurm.sbatch train' in done.stderr
