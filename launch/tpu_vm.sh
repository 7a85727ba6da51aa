#!/usr/bin/env bash
# A run on Cloud TPU VMs: one slice, or several, as one queued resource.
#
#   launch/tpu_vm.sh COMMAND --name=NAME --zone=ZONE [OPTION...] [-- ARG...]
#
# A worker is one machine of a slice. Commands; ARG... is what follows `grpo-jax`,
# as in `-- train --config=...`:
#   create   requests the machines
#   setup    waits for the machines, copies a commit of this checkout to each,
#            installs it, and checks that every worker has that commit. Refused
#            while a run is going on
#   once     runs `grpo-jax ARG...` on all workers and waits, as in `-- doctor`
#   run      starts `grpo-jax ARG...` on all workers, and returns. The run goes on
#            when you log out
#   status   says for each worker whether the run is going on, or how it has ended
#   logs     follows the log of one worker
#   watch    keeps a run going until it is done: creates, sets up and runs where
#            that is missing, creates new machines after a preemption, starts the
#            run again after the exit codes of start_again.sh, and stops all
#            workers after any other exit code
#   stop     asks all workers to save and to end, waits for that, and says how
#            each has ended. A watch then ends too
#   delete   gives the machines back: until then they cost money
#
# Options and their defaults:
#   --project=PROJECT       project of Google Cloud; the default is that of gcloud
#   --type=v5litepod-16     accelerator type of a slice
#   --runtime=VERSION       software version of the TPU VMs; the default is the one
#                           that fits the type
#   --slices=1              slices of that type (set config.mesh.slices too)
#   --spot                  cheaper machines, which may be taken away at any time
#   --revision=HEAD         the commit that setup copies
#   --files=gs://BUCKET/files   models and data that setup adds to the checkout
#   --extras=wandb,math     extras of pyproject.toml that setup installs, beside tpu
#                           and gcs
#   --code=FOLDER           a folder of your own, with configs, rewards and losses,
#                           that setup copies into the checkout under its own name;
#                           its requirements.txt is installed, if it has one
#   --code_revision=COMMIT  that commit of the folder, which is in a repository of
#                           git, instead of the files in it
#   --env=HF_TOKEN,...      names of variables that the run gets. Their values are
#                           those of your environment; they are never printed, and
#                           a worker deletes their file when it has read it
#   --slice=0 --worker=0    the worker whose log is followed
#   --max_restarts=20       how often watch starts the run again. It counts from 0
#                           after a run of ten minutes
#   --poll_secs=30          how often watch asks the workers, in seconds
#   --delete_after          watch deletes the machines when the run has ended
#   --dry_run               prints every command and runs none
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/start_again.sh
source launch/dry_run.sh
source launch/options.sh

name='' zone='' project='' type=v5litepod-16 runtime='' extras='' env=''
code='' code_revision='' secret=''
slices=1 spot='' revision=HEAD files='' slice=0 worker=0
max_restarts=20 poll_secs=30 delete_after='' dry_run=''

refuse() {
  echo "tpu_vm.sh: $*" >&2
  exit 2
}

# Runs a command whose output is an answer. In a dry run it is printed, and the
# next line of `story` is the answer.
ask() {
  if [ -z "$dry_run" ]; then
    "$@"
    return
  fi
  show "$@"
  local answer
  read -r answer <&4
  echo "#   as if the answer were: $answer" >&3
  echo "$answer"
}

# software TYPE: the software version for machines with such accelerators, by the page
# "TPU software versions" of Cloud TPU.
software() {
  case $1 in
    v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
  esac
}

# Refuses a type that Cloud TPU does not have, and a software version that is for
# other machines. One that is not known here may be new.
check_runtime() {
  local other
  case $type in
    v5e-*) refuse "--type=$type; Cloud TPU calls it v5litepod-${type#*-}." ;;
    tpu7x* | v7x*) refuse "--type=$type; TPU7x is to be had in GKE alone: gke.sh." ;;
  esac
  if [ -z "$fits" ] || ! [[ ${type#*-} =~ ^[1-9][0-9]*$ ]]; then
    refuse "--type=$type is no accelerator type of Cloud TPU; give one such as" \
      'v5litepod-16, v5p-128 or v6e-8.'
  fi
  check_size
  if [ "$runtime" = "$fits" ]; then return; fi
  for other in v4 v5litepod v5p v6e; do
    if [ "$runtime" = "$(software "$other-8")" ]; then
      refuse "--runtime=$runtime is for $other, and --type=$type needs $fits;" \
        'leave --runtime out.'
    fi
  done
}

# Refuses a number of chips, or of TensorCores, that no slice has.
check_size() {
  local number=${type#*-} sizes
  case $type in
    v2-* | v3-*) sizes='8, or a multiple of 32 TensorCores' ;;
    v4-* | v5p-*) sizes='8, 16, 32, 64, or a multiple of 128 TensorCores' ;;
    *) sizes='1, 4, 8, 16, 32, 64, 128 or 256 chips' ;;
  esac
  case $type in
    *-???????*) ;;
    v2-* | v3-*)
      if [ "$number" -eq 8 ] || [ $((number % 32)) -eq 0 ]; then return; fi
      ;;
    v4-* | v5p-*)
      case $number in 8 | 16 | 32 | 64) return ;; esac
      if [ $((number % 128)) -eq 0 ]; then return; fi
      ;;
    *) case $number in 1 | 4 | 8 | 16 | 32 | 64 | 128 | 256) return ;; esac ;;
  esac
  refuse "--type=$type; slices of ${type%%-*} have $sizes."
}

pause() { [ -n "$dry_run" ] || sleep "$poll_secs"; }

nodes() {
  if [ "$slices" -eq 1 ]; then
    echo "$name"
  else
    seq -f "$name-%g" 0 $((slices - 1))
  fi
}

# ssh_all go|ask COMMAND: on all workers of all slices, at the same time.
ssh_all() {
  local node call id ids=() failed=0
  for node in $(nodes); do
    call=("$1" gcloud compute tpus tpu-vm ssh "$node" "${where[@]}")
    call+=(--worker=all --command="$2")
    if [ -n "$dry_run" ]; then # one after another, so that it can be read
      "${call[@]}"
    else
      "${call[@]}" &
      ids+=($!)
    fi
  done
  for id in ${ids[@]+"${ids[@]}"}; do wait "$id" || failed=1; done
  return $failed
}

# on_all ARG...: `worker.sh ARG...` on all workers.
on_all() {
  ssh_all go "$(quoted grpo_jax/launch/worker.sh "$@")"
}

create() {
  local wanted=(--node-id="$name")
  if [ "$slices" -gt 1 ]; then
    wanted=(--node-count="$slices" --node-prefix="$name")
  fi
  go gcloud compute tpus queued-resources create "$name" "${where[@]}" \
    "${wanted[@]}" --accelerator-type="$type" --runtime-version="$runtime" \
    ${spot:+--spot}
}

delete() {
  go gcloud compute tpus queued-resources delete "$name" "${where[@]}" \
    --force --quiet
}

# The state of the queued resource; nothing if there is none.
state() {
  ask gcloud compute tpus queued-resources list "${where[@]}" \
    --filter="name~(^|/)$name\$" --format='value(state.state)'
}

# The commit that is copied. In a dry run git is not asked.
commit() {
  [ -z "$dry_run" ] || { echo "$revision" && return; }
  git rev-parse --verify --quiet "$revision^{commit}" ||
    refuse "--revision=$revision is no commit of this checkout."
}

setup() {
  local now told node wanted given=() archive=${TMPDIR:-/tmp}/grpo_jax-$name.tar.gz
  now=$(state)
  while [ "$now" != ACTIVE ]; do
    case $now in
      '' | FAILED | SUSPEND*) refuse "the machines are ${now:-not asked for};" \
        'use create (after delete, if they are gone), or watch.' ;;
    esac
    echo "the queued resource is $now" >&2
    sleep "$poll_secs"
    now=$(state)
  done
  told=$(status) || refuse 'a worker does not answer; try again.'
  if grep -q ^running <<<"$told"; then
    refuse 'a run is going on, and would lose its files; stop it first.'
  fi
  wanted=$(commit)
  if [ -z "$dry_run" ] && [ -n "$(git status --porcelain)" ]; then
    echo 'warning: changes that are not committed are not copied' >&2
  fi
  go git archive --format=tar.gz --output="$archive" "$wanted"
  for node in $(nodes); do
    go gcloud compute tpus tpu-vm scp "$archive" "$node:grpo_jax.tar.gz" \
      "${where[@]}" --worker=all
  done
  ssh_all go 'rm -rf grpo_jax && mkdir grpo_jax'
  ssh_all go 'tar -xzf grpo_jax.tar.gz -C grpo_jax'
  if [ -n "$files" ]; then
    ssh_all go "$(quoted gcloud storage rsync --recursive "$files" grpo_jax)"
  fi
  send_code
  if [ -n "$extras$folder" ]; then given=("$extras" "$folder"); fi
  on_all setup ${given[@]+"${given[@]}"}
  verify "$wanted"
}

# Copies the folder of --code to all workers, beside `configs`.
send_code() {
  [ -n "$code" ] || return 0
  local node archive=${TMPDIR:-/tmp}/grpo_jax-$name-code.tar.gz
  pack_code "$archive"
  for node in $(nodes); do
    go gcloud compute tpus tpu-vm scp "$archive" "$node:grpo_jax_code.tar.gz" \
      "${where[@]}" --worker=all
  done
  ssh_all go 'tar -xzf grpo_jax_code.tar.gz -C grpo_jax'
}

# Copies the values of --env to all workers, in a file that its owner alone may
# read. worker.sh deletes it when it has read it. So no value is in a command, which
# others see in the list of processes, and which gcloud writes into its logs.
send_env() {
  [ -n "$env" ] || return 0
  local node word file=${TMPDIR:-/tmp}/grpo_jax-$name.XXXXXX
  if [ -z "$dry_run" ]; then
    file=$(mktemp "$file")
    secret=$file
    for word in ${env//,/ }; do
      printf 'export %s=%q\n' "$word" "${!word}" >>"$file"
    done
  fi
  for node in $(nodes); do
    go gcloud compute tpus tpu-vm scp "$file" "$node:grpo_jax.env" \
      "${where[@]}" --worker=all
  done
  forget
}

# Deletes the file with values.
forget() {
  if [ -n "$secret" ]; then rm -f "$secret"; fi
  secret=''
}
trap forget EXIT

# verify COMMIT: compares what every worker has installed with what was asked for.
verify() {
  local told odd
  told=$(ssh_all ask 'grpo_jax/launch/worker.sh revision' |
    sed -n 's/^revision: //p') && [ -n "$told" ] ||
    refuse 'a worker does not say what it has installed; set up again.'
  odd=$(awk -v wanted="$1" '$2 != wanted {printf "%s has %s, ", $1, $2}' \
    <<<"$told")
  [ -z "$odd" ] || refuse "${odd}and not $1; set up again."
  echo "$1 is installed on $(awk '{printf "%s%s", sep, $1; sep = ", "}' \
    <<<"$told")"
}

status() {
  ssh_all ask 'grpo_jax/launch/worker.sh status || echo status: bare' |
    sed -n 's/^status: //p'
}

# The next step of watch, by what the workers say on standard input: `end CODE`,
# late (some run and others do not any more), setup, on, again or run.
next_step() {
  local word asked bare='' running='' died='' fresh=''
  while read -r word asked; do
    case $word in
      0) ;;
      bare) bare=1 ;;
      none) fresh=1 ;;
      running) running=1 ;;
      *)
        died=1
        if ! start_again "$word" "$asked"; then
          echo "end $word"
          return
        fi
        ;;
    esac
  done
  if [ -n "$running" ] && [ -n "$died$bare" ]; then
    echo late
  elif [ -n "$bare" ]; then
    echo setup
  elif [ -n "$running" ]; then
    echo on
  elif [ -n "$died" ]; then
    echo again
  elif [ -n "$fresh" ]; then
    echo run
  else
    echo 'end 0'
  fi
}

# look [SEEN]: the next step, by what the cloud says, and then the workers. Until
# a run was seen, exit codes are those of an earlier one.
look() {
  local now told earlier='s/^[0-9].*/none/'
  if [ -n "$1" ]; then earlier=''; fi
  now=$(state) || now=UNKNOWN
  case $now in
    ACTIVE)
      # Nothing is decided if a worker does not answer.
      if told=$(status) && [ -n "$told" ]; then
        sed "$earlier" <<<"$told" | next_step
      else
        echo silent
      fi
      ;;
    '') if [ -n "$1" ]; then echo gone; else echo create; fi ;;
    FAILED | SUSPENDED) echo recreate ;;
    *) echo wait ;; # on its way into the queue, or out of it
  esac
}

# Calls this script, so that what fails there does not end the watch.
self() { launch/tpu_vm.sh "$1" "${options[@]}" -- "${arguments[@]}"; }

take_step() {
  case $1 in
    create) self create ;;
    recreate) self delete && self create ;;
    setup) self setup && self run ;;
    run | again) self run ;;
    kill) on_all kill ;;
  esac
}

# finish CODE: what is done when a watch ends. Machines that do not answer are
# deleted too.
finish() {
  [ "$1" = 0 ] || on_all stop 90 || true
  if [ -n "$delete_after" ] && ! delete && ! delete; then
    echo 'tpu_vm.sh: the machines could not be deleted, and cost money;' \
      'use delete.' >&2
  fi
}

watch() {
  local step seen='' went='' restarts=0 late=0 silent=0 failures=0 begun=$SECONDS
  # After a preemption the same code goes on, whatever is committed meanwhile.
  revision=$(commit)
  options+=(--revision="$revision")
  if [ -n "$code_revision" ]; then
    code_revision=$(commit_of_code)
    options+=(--code_revision="$code_revision")
  fi
  while true; do
    step=$(look "$seen")
    case $step in wait | on) ;; *) echo "== $step" >&3 ;; esac
    case $step in on | late | run | setup) seen=1 ;; esac
    if [ "$step" = late ]; then late=$((late + 1)); else late=0; fi
    if [ "$step" = silent ]; then silent=$((silent + 1)); else silent=0; fi
    # A machine may hang though the cloud calls it well.
    if [ $((silent * poll_secs)) -gt 600 ]; then step=recreate; fi
    # The others end by themselves within half a minute, as a rule.
    if [ $((late * poll_secs)) -gt 90 ]; then step='kill'; fi
    case $step in
      end*)
        finish "${step#end }"
        return "${step#end }"
        ;;
      gone) refuse 'the machines were deleted, by another than this watch.' ;;
      again | recreate)
        # Time in the queue is no run.
        if [ -n "$went" ] && [ $((SECONDS - begun)) -ge 600 ]; then
          restarts=0
        fi
        if [ "$restarts" -ge "$max_restarts" ]; then
          finish 2
          refuse "the run has ended again, after $restarts new starts."
        fi
        restarts=$((restarts + 1))
        ;;
    esac
    case $step in
      on) went=1 ;;
      setup | run | again | recreate) begun=$SECONDS went='' ;;
    esac
    if [ "$step" = recreate ]; then seen=''; fi # of the new machines
    if take_step "$step"; then
      failures=0
    else
      failures=$((failures + 1))
      if [ $failures -ge 10 ]; then
        finish 2
        refuse "$step has failed ten times."
      fi
    fi
    pause
  done
}

command=${1:-}
options=() arguments=()
while [ $# -gt 1 ]; do
  shift
  case $1 in
    --name=* | --zone=* | --project=* | --type=* | --runtime=* | --slices=* | \
      --revision=* | --files=* | --extras=* | --code=* | \
      --code_revision=* | --env=* | --slice=* | --worker=* | --max_restarts=* | \
      --poll_secs=*)
      key=${1%%=*}
      printf -v "${key#--}" %s "${1#*=}"
      ;;
    --spot | --delete_after | --dry_run) printf -v "${1#--}" 1 ;;
    --)
      shift
      arguments=("$@")
      break
      ;;
    *) refuse "got $1; launch/tpu_vm.sh help lists the options." ;;
  esac
  options+=("$1")
done
whole 1 slices poll_secs
whole 0 slice worker max_restarts
if [ "$slice" -ge "$slices" ]; then
  refuse "--slice=$slice with --slices=$slices; the first slice is 0."
fi
check_extras
check_env
if [ -n "$code" ]; then
  code=$(path_from "$here" "$code")
  options+=(--code="$code")
fi
check_code
fits=$(software "$type")
runtime=${runtime:-$fits}
check_runtime
where=(--zone="$zone" ${project:+--project="$project"})
if [ -n "$dry_run" ]; then exec 3>&1; else exec 3>&2; fi

case $command in
  create | setup | once | run | status | logs | watch | stop | delete) ;;
  help | --help)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' launch/tpu_vm.sh
    exit
    ;;
  *) refuse "got '$command'; launch/tpu_vm.sh help lists the commands." ;;
esac
if [ -z "$name" ] || [ -z "$zone" ]; then
  refuse "$command needs --name and --zone."
fi
case $command in
  once | run | watch)
    if [ ${#arguments[@]} -eq 0 ]; then
      refuse "$command needs a command after --, as in -- train."
    fi
    ;;
esac

# What the cloud and the workers answer in a dry run, question after question.
# For watch: a preemption, then a process that has died, then the end.
case $command in
  watch)
    story=(SUSPENDED ACTIVE 'status: bare')
    story+=(ACTIVE 'status: 75' ACTIVE 'status: 0')
    ;;
  status) story=('status: running') ;;
  setup)
    story=(ACTIVE)
    for node in $(nodes); do story+=('status: bare'); done
    for node in $(nodes); do story+=("revision: $node-w-0 $revision"); done
    ;;
  *) story=(ACTIVE) ;;
esac
exec 4< <(printf '%s\n' "${story[@]}" "${story[@]}")

case $command in
  once)
    send_env
    on_all once "${arguments[@]}"
    ;;
  run)
    send_env
    on_all start "${arguments[@]}"
    ;;
  stop) on_all stop ;;
  logs)
    node=$(nodes | sed -n "$((slice + 1))p")
    go gcloud compute tpus tpu-vm ssh "$node" "${where[@]}" \
      --worker="$worker" --command='tail -n 100 -F grpo_jax_run/log'
    ;;
  *) "$command" ;;
esac
