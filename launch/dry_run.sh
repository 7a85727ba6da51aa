# shellcheck shell=bash
# Commands that are printed before they are run, or, in a dry run, instead. The
# script that sources this sets `dry_run`, and file descriptor 3 to print to.

# The words, with quotes where a shell needs them.
quoted() {
  local word text='' quote="'\\''"
  for word in "$@"; do
    case $word in
      '' | *[!a-zA-Z0-9_./:=,@%+-]*) text="$text '${word//\'/$quote}'" ;;
      *) text="$text $word" ;;
    esac
  done
  printf '%s' "${text# }"
}

show() { echo "+ $(quoted "$@")" >&3; }

# Prints a command, and runs it.
go() {
  show "$@"
  [ -n "$dry_run" ] || "$@"
}
