# shellcheck shell=bash
# Which exit codes of `grpo-jax` mean: give the same command again. The one
# place for scripts. `starts_again` in local.py says the same in Python, the
# numbers in gke_jobset.yaml say it to Kubernetes; a test compares the three.
#
#   0                     done
#   75                    another process is gone: start again
#   129 to 159, but 130   ended by a signal (128 + its number): start again. One
#                         is 143: stopped by SIGTERM, as when a node is taken
#   130                   Ctrl-C, by a person: do not
#   all others            such as 2: a new start would fail too
#
# A launcher that was itself asked to stop starts nothing again.

# start_again CODE [ASKED]: succeeds if the run is to be started again. CODE may
# be -n for signal n, as Python tells it. ASKED is not empty if the launcher was
# asked to stop.
start_again() {
  local code=$1 asked=${2:-}
  if [ "$code" -lt 0 ]; then code=$((128 - code)); fi
  if [ -n "$asked" ] || [ "$code" -eq 130 ]; then return 1; fi
  [ "$code" -eq 75 ] || { [ "$code" -gt 128 ] && [ "$code" -le 159 ]; }
}
