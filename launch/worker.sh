#!/usr/bin/env bash
# One worker's part of a run on TPU VMs. tpu_vm.sh calls it over ssh.
#
#   worker.sh setup         installs grpo_jax into an environment of its own
#   worker.sh start ARG...  starts `grpo-jax ARG...`, which outlives the ssh
#   worker.sh once ARG...   runs `grpo-jax ARG...` and waits for it
#   worker.sh status        prints `status: WORD`: bare (not installed), none
#                           (nothing was started), running, or the exit code;
#                           after `stop` there is a second word, `asked`
#   worker.sh stop [SECS]   asks it to save and to end; kills it after SECS
#   worker.sh kill          kills it
#
# The folder ~/grpo_jax_run has the log, the exit code and the process ids. A
# run holds the lock there, so what a reboot has ended is not taken for running.
set -euo pipefail
place=${GRPO_JAX_PLACE:-$HOME/grpo_jax_run}
venv=${GRPO_JAX_VENV:-$HOME/grpo_jax_venv}
program=$venv/bin/grpo-jax
mkdir -p "$place"

is_running() { ! flock --shared --nonblock "$place/lock" true; }

setup() {
  # The Python of these machines may be too old, so uv brings one.
  PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
  rm -rf "$venv"
  "$HOME/.local/bin/uv" venv --quiet --python=3.12 "$venv"
  "$HOME/.local/bin/uv" pip install --quiet --python="$venv" "${PWD}[tpu,gcs]"
}

start() {
  exec 9>>"$place/lock"
  if ! flock --wait=2 9; then # `status` takes the lock for a moment
    echo 'worker.sh: a run is going on here; stop it first.' >&2
    exit 2
  fi
  rm -f "$place/code" "$place/asked" "$place/pid" "$place/group"
  printf '== %s: grpo-jax %s\n' "$(date)" "$*" >>"$place/log"
  setsid launch/worker.sh hold "$@" >>"$place/log" 2>&1 </dev/null &
  for ((tenths = 0; tenths < 100; tenths++)); do
    if [ -s "$place/pid" ]; then return; fi
    sleep 0.1
  done
  echo "worker.sh: nothing has started within 10 s; see $place/log." >&2
  exit 2
}

# The process that waits for the run, leads its group and holds the lock.
hold() {
  echo $$ >"$place/group"
  "$program" "$@" 9>&- &
  echo $! >"$place/pid"
  local code=0
  wait $! || code=$?
  echo "$code" >"$place/code"
  kill -KILL -- -$$ # what the run has left behind, which may hold the chips
}

status() {
  local word=none
  if [ ! -x "$program" ]; then
    word=bare
  elif is_running; then
    word=running
  elif [ -s "$place/code" ]; then
    word=$(cat "$place/code")
  elif [ -e "$place/pid" ]; then
    word=137 # it was killed before it could say how it ended
  fi
  if [ -e "$place/asked" ]; then word="$word asked"; fi
  echo "status: $word"
}

stop() {
  touch "$place/asked"
  if ! is_running; then return; fi
  kill -TERM "$(cat "$place/pid")" || true
  local end=$((SECONDS + ${1:-300}))
  while [ $SECONDS -lt $end ]; do
    if ! is_running; then return; fi
    sleep 0.2
  done
  kill_run
}

kill_run() {
  if is_running; then kill -KILL -- "-$(cat "$place/group")"; fi
}

# Relative paths in the command begin at the checkout.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
set -- "${1:-status}" "${@:2}"
case $1 in
  setup | start | hold | status | stop) "$@" ;;
  once) "$program" "${@:2}" ;;
  kill) kill_run ;;
  *)
    echo "worker.sh: got $1; the commands are at the head of the file." >&2
    exit 2
    ;;
esac
