# shellcheck shell=bash
# Checks of the options of a launcher. The script that sources this has the
# function `refuse`, which prints a sentence and exits.

# whole LEAST NAME...: refuses options that are no whole number, LEAST or more. The
# value of an option is in the variable of its name.
whole() {
  local least=$1 option
  shift
  for option in "$@"; do
    case ${!option} in
      # In shell arithmetic 010 is 8, and 08 an error.
      '' | *[!0-9]* | 0?* | ???????*) ;;
      *) if [ "${!option}" -ge "$least" ]; then continue; fi ;;
    esac
    refuse "--$option=${!option}; give a whole number from $least to 999999."
  done
}
