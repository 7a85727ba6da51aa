"""launch/gke_jobset.yaml, filled in, against the fields of JobSet."""

import base64
import json
import pathlib
import re

import jsonschema
import pytest
import yaml

from tests.launch import scripts

# Made by hand of the fields used; its "$comment" names the source.
SCHEMA = json.loads(
  pathlib.Path(__file__).with_name('jobset_schema.json').read_text()
)
NASTY = ['train', '--config.x=({"a":"b\\c|d&e"},)', "it's", '--y=$NAME $(Z) #1']


def filled(*options, arguments=('train',)):
  """The manifest that `gke.sh run` creates."""
  done = scripts.run(
    scripts.LAUNCH / 'gke.sh', 'run', '--name=run', '--image=registry/a:1',
    *options, '--dry_run', '--', *arguments, A_TOKEN='hidden',
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  _, command, manifest = re.split('(.* kubectl create .*\n)', done.stdout)
  return yaml.safe_load(manifest)


def job_of(manifest):
  (one,) = manifest['spec']['replicatedJobs']
  return one['replicas'], one['template']['spec']


@pytest.mark.parametrize(
  'options',
  [(), ('--spot', '--slices=4', '--topology=2x2x4', '--env=A_TOKEN')],
)
def test_the_manifest_has_the_fields_of_jobset(options):
  jsonschema.validate(filled(*options), SCHEMA)


@pytest.mark.parametrize(
  'break_it',
  [
    lambda spec: spec.update(failurePolice={}),
    lambda spec: spec['failurePolicy'].update(maxRestarts='5'),
    lambda spec: spec['failurePolicy']['rules'][0].update(action='Restart'),
    lambda spec: spec['failurePolicy']['rules'][1].pop('name'),
    lambda spec: spec['replicatedJobs'][0].pop('template'),
    lambda spec: spec['replicatedJobs'][0].update(replicas='$SLICES'),
  ],
)
def test_the_schema_refuses_what_jobset_refuses(break_it):
  manifest = filled()
  break_it(manifest['spec'])
  with pytest.raises(jsonschema.ValidationError):
    jsonschema.validate(manifest, SCHEMA)


@pytest.mark.parametrize(
  'topology, chips, hosts', [('4x4', 4, 4), ('2x4', 8, 1), ('4x4x8', 4, 32)]
)
def test_a_pod_for_each_machine_of_each_slice(topology, chips, hosts):
  replicas, job = job_of(
    filled(f'--topology={topology}', f'--chips_per_host={chips}', '--slices=3')
  )
  assert (replicas, job['parallelism'], job['completions']) == (3, hosts, hosts)
  pod = job['template']['spec']
  (container,) = pod['containers']
  assert container['resources']['limits'] == {'google.com/tpu': chips}
  selector = pod['nodeSelector']
  assert selector['cloud.google.com/gke-tpu-topology'] == topology


def test_arguments_arrive_as_they_were_typed():
  typed = [*NASTY, 'two\nlines and\ta tab']
  _, job = job_of(filled(arguments=typed))
  written = job['template']['spec']['containers'][0]['args']
  # Kubernetes takes two dollars for one.
  assert [one.replace('$$', '$') for one in written] == typed
  assert not [one for one in written if '$' in one.replace('$$', '')]


def test_spot_machines_only_if_asked_for():
  for options, there in ((), False), (('--spot',), True):
    _, job = job_of(filled(*options))
    selector = job['template']['spec']['nodeSelector']
    assert ('cloud.google.com/gke-spot' in selector) is there


def test_variables_come_from_a_secret():
  (container,) = job_of(filled('--env=A_TOKEN'))[1]['template']['spec'][
    'containers'
  ]
  assert container['envFrom'] == [{'secretRef': {'name': 'run-env'}}]
  assert 'envFrom' not in str(filled())


def test_the_secret_has_the_values_and_no_command_has_them(tmp_path):
  scripts.stand_in(
    tmp_path, 'kubectl', f'echo "$*" >>{tmp_path}/words; cat >>{tmp_path}/given'
  )
  value = 'two\nlines $HOME "quoted"'
  done = scripts.run(
    scripts.LAUNCH / 'gke.sh', 'run', '--name=run', '--image=registry/a:1',
    '--env=A_TOKEN', '--', 'train', programs=tmp_path, A_TOKEN=value,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  given = (tmp_path / 'given').read_text().partition('apiVersion: jobset')[0]
  found = yaml.safe_load(given)
  assert found['kind'] == 'Secret' and found['metadata']['name'] == 'run-env'
  assert base64.b64decode(found['data']['A_TOKEN']).decode() == value
  said = done.stdout + done.stderr + (tmp_path / 'words').read_text()
  assert 'lines' not in said and found['data']['A_TOKEN'] not in said


def decided(manifest, message):
  """What the JobSet does after a Job has failed by a rule of its own."""
  for rule in manifest['spec']['failurePolicy']['rules']:
    assert rule['onJobFailureReasons'] == ['PodFailurePolicy']
    patterns = rule.get('onJobFailureMessagePatterns', [''])
    if any(pattern in message for pattern in patterns):
      return rule['action']
  return 'RestartJobSet'


@pytest.mark.parametrize(
  'message, action',
  [
    # As Kubernetes writes them (pkg/controller/job/pod_failure_policy.go).
    (
      'Pod lab/run-slice-0-1 has condition DisruptionTarget matching FailJob '
      'rule at index 0',
      'RestartJobSetAndIgnoreMaxRestarts',
    ),
    (
      'Container grpo-jax for pod lab/run-slice-0-1 failed with exit code 143 '
      'matching FailJob rule at index 1',
      'RestartJobSetAndIgnoreMaxRestarts',
    ),
    (
      'Container grpo-jax for pod lab/run-slice-0-1 failed with exit code 2 '
      'matching FailJob rule at index 2',
      'FailJobSet',
    ),
  ],
)
def test_what_the_jobset_does_after_a_failure(message, action):
  assert decided(filled(), message) == action
