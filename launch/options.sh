# shellcheck shell=bash
# Checks of the options of a launcher. The script that sources this has the
# function `refuse`, which prints a sentence and exits, and sets all options.

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

# path_from HERE PATH: a path that was typed in folder HERE, for the root of the checkout,
# which is the current directory.
path_from() {
  case $2 in
    /*) echo "$2" ;;
    *) if [ "$1" = "$PWD" ]; then echo "$2"; else echo "$1/$2"; fi ;;
  esac
}

# Refuses --extras that are no names.
check_extras() {
  if [ -n "$extras" ] && ! [[ $extras =~ ^[a-z0-9-]+(,[a-z0-9-]+)*$ ]]; then
    refuse "--extras=$extras; give names of pyproject.toml, as in wandb,math."
  fi
}

# Refuses --env, unless it has names of variables that are set. A value that was
# typed by mistake is not printed.
# shellcheck disable=SC2154
check_env() {
  local word
  for word in ${env//,/ }; do
    if [[ $word == *=* ]]; then
      word=${word%%=*}
      refuse "--env takes names alone: export $word, and give --env=$word."
    elif ! [[ $word =~ ^[a-zA-Z_][a-zA-Z0-9_]*$ ]]; then
      refuse '--env is no list of names; give such as HF_TOKEN,WANDB_API_KEY.'
    elif [ -z "${!word+set}" ]; then
      refuse "--env=$word, but $word is not set here; export it first."
    fi
  done
}

# Sets `folder`, the name of the folder of --code, and refuses one that cannot be
# copied into the checkout under its name. It lies in `parent`, by this name: the
# folder may be a link to another one elsewhere.
check_code() {
  folder='' parent=$code/..
  if [ -z "$code" ]; then
    if [ -z "$code_revision" ]; then return; fi
    refuse "--code_revision=$code_revision is a commit of --code; give both."
  fi
  [ -d "$code" ] || refuse "--code=$code is no folder; give one of your own."
  folder=$(basename "$(cd "$code" && pwd)")
  if ! [ "$parent/$folder" -ef "$code" ]; then
    parent=$(dirname "$(cd "$code" && pwd)")
  fi
  case $folder in
    grpo_jax | configs | launch | tests)
      refuse "--code=$code has the name of a folder of the checkout; rename it."
      ;;
    .* | -* | *[!a-zA-Z0-9_.-]*)
      refuse "--code=$code; give a folder whose name has letters, digits, _, -" \
        'and . alone.'
      ;;
  esac
}

# The commit that --code_revision names. In a dry run git is not asked.
commit_of_code() {
  [ -z "$dry_run" ] || { echo "$code_revision" && return; }
  git -C "$code" rev-parse --verify --quiet "$code_revision^{commit}" ||
    refuse "--code_revision=$code_revision is no commit of the repository of" \
      "$code."
}

# pack_code FILE: the folder of --code as FILE, an archive of `tar` and `gzip`,
# without files that may hold secrets, and what git and Python keep there.
pack_code() {
  local at
  if [ -n "$code_revision" ]; then
    at=$(commit_of_code)
    # In a folder below the root of its repository, git packs this folder alone.
    go git -C "$code" archive --format=tar.gz --prefix="$folder/" \
      --output="$1" "$at"
  else
    # The point makes tar follow a link.
    go tar -czf "$1" --exclude=.git --exclude=.env --exclude='.env.*' \
      --exclude=.venv --exclude=__pycache__ --directory="$parent" "$folder/."
  fi
}
