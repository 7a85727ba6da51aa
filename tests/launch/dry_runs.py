"""What the launchers print in dry runs: `python -m tests.launch.dry_runs`.

The command writes the files in golden/ anew, with which `dry_runs_test.py`
compares. Nothing is started, and no cloud is asked.
"""

import pathlib
import shlex

from tests.launch import scripts

GOLDEN = pathlib.Path(__file__).with_name('golden')
_POD = '--name=pod --zone=us-west4-a'
_TWO = '--name=pod --zone=us-east5-a --project=lab --type=v5p-128 --slices=2'
_TRAIN = '-- train --config=configs/arithmetic.py --workdir=gs://bucket/run'
_REWARDS = """'--config.rewards=({"name":"my.lab:judge","weight":1.0},)'"""

_OWN = '--extras=wandb --code=launch/own_code --env=HF_TOKEN,WANDB_API_KEY'
_MINE = '-- train --config=own_code/config.py --workdir=gs://bucket/run'
# What no transcript may hold.
SECRETS = {'HF_TOKEN': 'hf_nobody', 'WANDB_API_KEY': 'key of nobody'}

CASES = {
  'own_code.txt': (
    f'tpu_vm.sh setup {_POD} {_OWN} --dry_run',
    f'tpu_vm.sh once {_POD} {_OWN} --dry_run {_MINE} --check',
    f'tpu_vm.sh watch {_POD} {_OWN} --code_revision=v1 --dry_run {_MINE}',
    f'gke.sh build --image=registry/grpo_jax:1 {_OWN} --dry_run',
    'gke.sh build --image=registry/grpo_jax:1 --code=launch/own_code '
    '--code_revision=v1 --dry_run',
    'gke.sh run --name=run --image=registry/grpo_jax:1 '
    f'--env=HF_TOKEN,WANDB_API_KEY --dry_run {_MINE}',
  ),
  'tpu_vm.txt': (
    f'tpu_vm.sh create {_POD} --spot --dry_run',
    f'tpu_vm.sh setup {_POD} --dry_run',
    f'tpu_vm.sh once {_POD} --dry_run -- doctor --workdir=gs://bucket/run',
    f'tpu_vm.sh run {_POD} --dry_run {_TRAIN} {_REWARDS}',
    f'tpu_vm.sh status {_POD} --dry_run',
    f'tpu_vm.sh logs {_POD} --worker=3 --dry_run',
    f'tpu_vm.sh watch {_POD} --spot --delete_after --dry_run {_TRAIN}',
    f'tpu_vm.sh stop {_POD} --dry_run',
    f'tpu_vm.sh delete {_POD} --dry_run',
  ),
  'tpu_vm_two_slices.txt': (
    f'tpu_vm.sh create {_TWO} --dry_run',
    f'tpu_vm.sh setup {_TWO} --revision=v1 --files=gs://bucket/files --dry_run',
    f'tpu_vm.sh run {_TWO} --dry_run {_TRAIN} --config.mesh.slices=2',
    f'tpu_vm.sh logs {_TWO} --slice=1 --dry_run',
  ),
  'gke.txt': (
    f'gke.sh run --name=run --image=registry/grpo_jax:1 --dry_run {_TRAIN}',
    'gke.sh run --name=run --image=registry/grpo_jax:1 --slices=2 --spot '
    '--accelerator=tpu-v5p-slice --topology=4x4x4 --max_restarts=5 '
    f'--service_account=trainer --namespace=lab --dry_run {_TRAIN} {_REWARDS}',
    'gke.sh status --name=run --dry_run',
    'gke.sh logs --name=run --dry_run',
    'gke.sh delete --name=run --dry_run',
  ),
}


def transcript(commands):
  """What is typed, and what is printed."""
  lines = []
  for command in commands:
    script, *arguments = shlex.split(command)
    done = scripts.run(
      scripts.LAUNCH / script, *arguments, TMPDIR='/tmp', **SECRETS
    )
    assert done.returncode == 0 and not done.stderr, (command, done.stderr)
    lines += [f'$ launch/{command}', done.stdout]
  return '\n'.join(lines)


def main():
  """Writes the files."""
  for name, commands in CASES.items():
    (GOLDEN / name).write_text(transcript(commands))


if __name__ == '__main__':
  main()
