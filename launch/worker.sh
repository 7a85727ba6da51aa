#!/usr/bin/env bash
# The part of a run on one TPU VM. tpu_vm.sh calls it over ssh.
#
#   worker.sh setup [EXTRAS [CODE]]   installs grpo_jax with extras into an
#                           environment of its own, and the requirements.txt of the
#                           folder CODE, if no run is going on here
#   worker.sh revision      prints `revision: HOST COMMIT`: what setup has installed
#   worker.sh start ARG...  starts `grpo-jax ARG...`, which outlives the ssh
#   worker.sh once ARG...   runs `grpo-jax ARG...` and waits for it
#   worker.sh status        prints `status: WORD`: bare (not installed), none
#                           (nothing was started), running, or the exit code;
#                           after `stop` there is a second word, `asked`
#   worker.sh stop [SECS]   asks the run to save and to end, waits for that, kills
#                           the run after SECS (300), and says how it has ended
#   worker.sh kill          kills the run
#
# The folder ~/grpo_jax_run has the log, the exit code and the process ids. The
# process `hold` waits for the run and has the lock there, so a run that a reboot
# has ended is not taken for running. Variables for the run come in the file
# ~/grpo_jax.env, which is deleted as soon as it is read.
set -euo pipefail
place=${GRPO_JAX_PLACE:-$HOME/grpo_jax_run}
venv=${GRPO_JAX_VENV:-$HOME/grpo_jax_venv}
program=$venv/bin/grpo-jax
mkdir -p "$place"

refuse() {
  echo "worker.sh: $(hostname): $*" >&2
  exit 2
}

say() { echo "$(hostname): $*"; }

# When a process was born. Process ids are used again, at the latest after a
# reboot. Fails if there is no such process, or if it has ended and only its
# parent has not asked for its exit code yet (state Z).
born() {
  local stat
  stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
  # The second field, the name in brackets, may hold spaces.
  read -ra stat <<<"${stat##*') '}"
  [ "${stat[0]}" != Z ] || return 1
  echo "$(cat /proc/sys/kernel/random/boot_id) ${stat[19]}"
}

# Whether the program of the run lives; it may outlive `hold`, if that is killed.
is_alive() {
  [ -s "$place/pid" ] && [ -s "$place/born" ] &&
    [ "$(born "$(cat "$place/pid")")" = "$(cat "$place/born")" ]
}

is_running() {
  ! flock --shared --nonblock "$place/lock" true || is_alive
}

# ends_within SECS: waits; fails if a run is still going on then.
ends_within() {
  local end=$((SECONDS + $1))
  while is_running; do
    if [ $SECONDS -ge $end ]; then return 1; fi
    sleep 0.2
  done
}

refuse_if_running() {
  if is_running; then refuse 'a run is going on here; stop it first.'; fi
}

# The commit of the archive that this checkout was copied in, where git wrote it.
archived() {
  { gzip -dc "$HOME/grpo_jax.tar.gz" 2>/dev/null || true; } | head -c 2048 |
    sed -n 's/^.* comment=\([0-9a-f]\{40,\}\)$/\1/p' | head -n 1
}

# Sets the variables that tpu_vm.sh has sent.
take_env() {
  local file=${GRPO_JAX_ENV:-$HOME/grpo_jax.env}
  if [ ! -f "$file" ]; then return; fi
  # shellcheck disable=SC1090
  source "$file"
  rm -f "$file"
}

setup() {
  local commit installed extras=${1:-} code=${2:-}
  refuse_if_running
  commit=$(LC_ALL=C archived)
  # The Python of these machines may be too old, so uv brings one.
  PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
  rm -rf "$venv"
  "$HOME/.local/bin/uv" venv --quiet --python=3.12 "$venv"
  "$HOME/.local/bin/uv" pip install --quiet --python="$venv" \
    "${PWD}[tpu,gcs${extras:+,$extras}]"
  if [ -n "$code" ] && [ -f "$code/requirements.txt" ]; then
    "$HOME/.local/bin/uv" pip install --quiet --python="$venv" \
      --requirement="$code/requirements.txt"
  fi
  # `-I`: the package that is installed, and not the one in this folder.
  installed=$("$venv/bin/python" -I -c 'from importlib import util
print(util.find_spec("grpo_jax").submodule_search_locations[0])')
  if ! diff -rq --exclude=__pycache__ --exclude=configs grpo_jax \
    "$installed" >&2; then
    rm -rf "$venv"
    refuse 'what was installed differs from what was copied; set it up again.'
  fi
  echo "${commit:-unknown}" >"$venv/revision"
}

revision() {
  local commit
  commit=$(cat "$venv/revision" 2>/dev/null) || commit=nothing
  echo "revision: $(hostname) $commit"
}

start() {
  exec 9>>"$place/lock"
  # `status` takes the lock for a moment.
  if ! flock --wait=2 9 || is_alive; then
    if [ -e "$place/asked" ]; then
      refuse 'the run that was asked to stop has not ended yet; wait for it, or' \
        'stop it again.'
    fi
    refuse 'a run is going on here; stop it first.'
  fi
  rm -f "$place/code" "$place/asked" "$place/pid" "$place/born" "$place/group"
  printf '== %s: grpo-jax %s\n' "$(date)" "$*" >>"$place/log"
  setsid launch/worker.sh hold "$@" >>"$place/log" 2>&1 </dev/null &
  for ((tenths = 0; tenths < 100; tenths++)); do
    if [ -s "$place/pid" ]; then return; fi
    sleep 0.1
  done
  refuse "nothing has started within 10 s; see $place/log."
}

# The process that waits for the run, leads its group and holds the lock.
hold() {
  echo $$ >"$place/group"
  "$program" "$@" 9>&- &
  born $! >"$place/born" || true
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
  local secs=${1:-300}
  case $secs in *[!0-9]* | 0?*) refuse "stop $secs; give whole seconds." ;; esac
  touch "$place/asked"
  if ! is_running; then
    say 'no run is going on'
    return
  fi
  if is_alive; then kill -TERM "$(cat "$place/pid")" || true; fi
  if ends_within "$secs"; then
    say "the run has ended, with exit code $(cat "$place/code" 2>/dev/null ||
      echo unknown)"
  else
    kill_run "the run had not ended $secs s after it was asked to, and was killed"
  fi
}

# kill_run TEXT: kills the run, if there is one, and says so.
kill_run() {
  if ! is_running; then return; fi
  kill -KILL -- "-$(cat "$place/group")" || true
  ends_within 30 || refuse 'the run does not end though it was killed, because a' \
    'device or a file system hangs; restart this machine.'
  say "$1"
}

# Relative paths in the command begin at the checkout.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
set -- "${1:-status}" "${@:2}"
case $1 in start | once) take_env ;; esac
case $1 in
  setup | revision | start | hold | status | stop) "$@" ;;
  once)
    refuse_if_running
    "$program" "${@:2}"
    ;;
  kill) kill_run 'the run was killed' ;;
  *) refuse "got $1; the commands are at the head of the file." ;;
esac
