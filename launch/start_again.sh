# shellcheck shell=bash
# After which exit codes of `grpo-jax` a launcher starts the same command again. All
# scripts source this file. `starts_again` in local.py says the same in Python, and
# the numbers in gke_jobset.yaml say it to Kubernetes; a test compares the three.
#
#   0                     the run is done: no
#   75                    another process is lost: start again
#   129 to 159, but 130   ended by a signal (128 + its number): start again. One
#                         of them is 143, SIGTERM, as when a host is taken away
#   130                   Ctrl-C, by a person: no
#   all others            an error that a new start would meet again: no
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
