#!/usr/bin/env bash
# A run on Cloud TPU VMs: one slice, or several, as one queued resource.
#
#   launch/tpu_vm.sh COMMAND --name=NAME --zone=ZONE [OPTION...] [-- ARG...]
#
# Commands; ARG... is what follows `grpo-jax`, as in `-- train --config=...`:
#   create   asks for the machines
#   setup    waits for them, copies this checkout to each, and installs it
#   once     runs `grpo-jax ARG...` on all workers and waits, as in `-- doctor`
#   run      starts `grpo-jax ARG...` on all workers; it goes on without you
#   status   says for each worker whether it runs, or how it has ended
#   logs     follows what one worker prints
#   watch    keeps a run going until it is done. Creates, sets up and runs where
#            that is missing, makes the machines anew after a preemption, starts
#            again after the exit codes of start_again.sh, and else stops all
#   stop     asks all workers to save and to end; a watch then ends too
#   delete   gives the machines back: until then they cost money
#
# Options:
#   --project=PROJECT       default: that of gcloud
#   --type=v5litepod-16     accelerator type of a slice
#   --runtime=v2-alpha-tpuv5-lite   software version of the machines
#   --slices=1              slices of that type (set config.mesh.slices too)
#   --spot                  cheaper machines, which may be taken away
#   --revision=HEAD         the commit that setup copies
#   --files=gs://BUCKET/files   models and data that setup adds to the checkout
#   --slice=0 --worker=0    whose log to follow
#   --max_restarts=20       limit for watch, counted anew after ten minutes' run
#   --poll_secs=30          how often watch looks
#   --delete_after          watch deletes the machines when the run has ended
#   --dry_run               prints every command and runs none
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/start_again.sh
source launch/dry_run.sh

name='' zone='' project='' type=v5litepod-16 runtime=v2-alpha-tpuv5-lite
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

setup() {
  local now node archive=${TMPDIR:-/tmp}/grpo_jax-$name.tar.gz
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
  if [ -z "$dry_run" ] && [ -n "$(git status --porcelain)" ]; then
    echo 'warning: changes that are not committed are not copied' >&2
  fi
  go git archive --format=tar.gz --output="$archive" "$revision"
  for node in $(nodes); do
    go gcloud compute tpus tpu-vm scp "$archive" "$node:grpo_jax.tar.gz" \
      "${where[@]}" --worker=all
  done
  ssh_all go 'rm -rf grpo_jax && mkdir grpo_jax'
  ssh_all go 'tar -xzf grpo_jax.tar.gz -C grpo_jax'
  if [ -n "$files" ]; then
    ssh_all go "$(quoted gcloud storage rsync --recursive "$files" grpo_jax)"
  fi
  on_all setup
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
  [ -n "$dry_run" ] || options+=(--revision="$(git rev-parse "$revision")")
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
      --revision=* | --files=* | --slice=* | --worker=* | --max_restarts=* | \
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
    *) refuse "got $1; the options are at the head of the file." ;;
  esac
  options+=("$1")
done
where=(--zone="$zone" ${project:+--project="$project"})
if [ -n "$dry_run" ]; then exec 3>&1; else exec 3>&2; fi

case $command in
  create | setup | once | run | status | logs | watch | stop | delete) ;;
  help | --help)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' launch/tpu_vm.sh
    exit
    ;;
  *) refuse "got '$command'; the commands are at the head of the file." ;;
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
  *) story=(ACTIVE) ;;
esac
exec 4< <(printf '%s\n' "${story[@]}" "${story[@]}")

case $command in
  once) on_all once "${arguments[@]}" ;;
  run) on_all start "${arguments[@]}" ;;
  stop) on_all stop ;;
  logs)
    node=$(nodes | sed -n "$((slice + 1))p")
    go gcloud compute tpus tpu-vm ssh "$node" "${where[@]}" \
      --worker="$worker" --command='tail -n 100 -F grpo_jax_run/log'
    ;;
  *) "$command" ;;
esac
