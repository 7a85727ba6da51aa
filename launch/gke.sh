#!/usr/bin/env bash
# A run on TPU slices in a GKE cluster, as a JobSet that restarts the run by itself.
#
#   launch/gke.sh COMMAND --name=NAME [OPTION...] [-- ARG...]
#
# Commands:
#   build    builds the container image with launch/Dockerfile, and pushes it
#   run      fills in gke_jobset.yaml and creates the JobSet; ARG... is what
#            follows `grpo-jax`, as in `-- train --config=...`
#   status   shows the JobSet, with the number of its restarts, and its pods
#   logs     follows the log of the first process
#   delete   lets the run save and end, and removes the JobSet and its variables.
#            The nodes stay, and cost money, until their node pool is deleted
#
# Options and their defaults:
#   --image=IMAGE             the container image, that `build` has made
#   --extras=wandb,math       extras of pyproject.toml that build installs, beside
#                             tpu and gcs
#   --code=FOLDER             a folder of your own, with configs, rewards and
#                             losses, that build puts into the image under its own
#                             name; its requirements.txt is installed, if it has one
#   --code_revision=COMMIT    that commit of the folder, which is in a repository of
#                             git, instead of the files in it
#   --env=HF_TOKEN,...        names of variables that the run gets. Their values are
#                             those of your environment; they are never printed, and
#                             lie in a Secret of Kubernetes, until delete
#   --accelerator=tpu-v5-lite-podslice   TPU type of a slice, as GKE names it
#   --topology=4x4            chips of a slice
#   --chips_per_host=4        chips of one host of a slice
#   --slices=1                number of slices (set config.mesh.slices too)
#   --spot                    run on spot nodes, which may be taken away at any
#                             time
#   --max_restarts=20         how often the JobSet is started again. Restarts
#                             after a preemption are not counted
#   --service_account=default   account of Kubernetes that may write to the bucket
#   --namespace=default       namespace of Kubernetes
#   --dry_run                 prints every command and runs none
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/dry_run.sh
source launch/options.sh

name='' image='' accelerator=tpu-v5-lite-podslice topology=4x4 chips_per_host=4
extras='' code='' code_revision='' env=''
slices=1 spot='' max_restarts=20 service_account=default namespace=default
dry_run=''

refuse() {
  echo "gke.sh: $*" >&2
  exit 2
}

# The arguments as a list of JSON, which is YAML too. Kubernetes takes two dollars
# for one, and would fill in what one begins.
listed() {
  local word text=''
  for word in "$@"; do
    word=${word//\\/\\\\}
    word=${word//$'\n'/\\n}
    word=${word//$'\t'/\\t}
    word=${word//\$/\$\$}
    text="$text, \"${word//\"/\\\"}\""
  done
  printf '[%s]' "${text#, }"
}

# fill WORD VALUE: the manifest with a value for a word.
fill() { sed "s|\\\$$1\$|$(printf '%s' "$2" | sed 's/[\\|&]/\\&/g')|"; }

manifest() {
  local drop='/^#/d'
  if [ -z "$spot" ]; then drop="$drop; /--spot\$/d"; fi
  if [ -z "$env" ]; then drop="$drop; /--env\$/d"; fi
  drop="$drop; s/ # only with --env\$//"
  sed "$drop" launch/gke_jobset.yaml |
    fill NAME "$name" | fill IMAGE "$image" | fill ACCELERATOR "$accelerator" |
    fill TOPOLOGY "$topology" | fill CHIPS_PER_HOST "$chips_per_host" |
    fill HOSTS "$hosts" | fill SLICES "$slices" |
    fill MAX_RESTARTS "$max_restarts" | fill SECRET "$name-env" |
    fill SERVICE_ACCOUNT "$service_account" | fill ARGS "$(listed "$@")"
}

# A Secret with the values of --env, which are not printed in a dry run.
secret() {
  local word value
  printf 'apiVersion: v1\nkind: Secret\nmetadata:\n  name: %s-env\n' "$name"
  printf 'type: Opaque\ndata:\n'
  for word in ${env//,/ }; do
    value='(not printed)'
    if [ -z "$dry_run" ]; then
      value=$(printf %s "${!word}" | base64 | tr -d '\n')
    fi
    printf '  %s: %s\n' "$word" "$value"
  done
}

build() {
  local options=(--build-arg=EXTRA=tpu${extras:+,$extras}) place made=''
  if [ -n "$code" ]; then
    # A copy, so that no file that may hold a secret gets into the image.
    place=${TMPDIR:-/tmp}/grpo_jax-code
    if [ -z "$dry_run" ]; then place=$(mktemp -d) made=$place; fi
    pack_code "$place.tar.gz"
    go tar -xzf "$place.tar.gz" --directory="$place"
    options+=(--build-arg=CODE="$folder" --build-context=code="$place/$folder")
  fi
  go docker build --file=launch/Dockerfile "${options[@]}" --tag="$image" .
  if [ -n "$made" ]; then rm -rf "$made" "$made.tar.gz"; fi
  go docker push "$image"
}

command=${1:-}
[ $# -eq 0 ] || shift
while [ $# -gt 0 ]; do
  case $1 in
    --name=* | --image=* | --accelerator=* | --topology=* | --slices=* | \
      --chips_per_host=* | --max_restarts=* | --service_account=* | \
      --namespace=* | --extras=* | --code=* | --code_revision=* | --env=*)
      key=${1%%=*}
      printf -v "${key#--}" %s "${1#*=}"
      ;;
    --spot | --dry_run) printf -v "${1#--}" 1 ;;
    --)
      shift
      break
      ;;
    *) refuse "got $1; launch/gke.sh help lists the options." ;;
  esac
  shift
done
if [ -n "$dry_run" ]; then exec 3>&1; else exec 3>&2; fi
whole 1 slices chips_per_host
whole 0 max_restarts
check_extras
check_env
[ -z "$code" ] || code=$(path_from "$here" "$code")
check_code
label=jobset.sigs.k8s.io/jobset-name=$name

case $command in
  run | status | logs | delete)
    [ -n "$name" ] || refuse "$command needs --name."
    ;;
esac
case $command in
  run)
    if [ -z "$image" ] || [ $# -eq 0 ]; then
      refuse 'run needs --image, and a command after --, as in -- train.'
    fi
    if ! [[ $topology =~ ^[1-9][0-9]{0,4}(x[1-9][0-9]{0,4}){0,2}$ ]]; then
      refuse "--topology=$topology; give such as 4x4."
    fi
    chips=$((${topology//x/ * }))
    if [ $((chips % chips_per_host)) -ne 0 ]; then
      refuse "--topology=$topology has $chips chips, which is no multiple of" \
        "--chips_per_host=$chips_per_host."
    fi
    hosts=$((chips / chips_per_host))
    if [ -n "$env" ]; then
      # On the server's side, so that no annotation has the values too.
      go kubectl apply --namespace="$namespace" --server-side \
        --force-conflicts --filename=- < <(secret)
      [ -z "$dry_run" ] || secret
    fi
    # Strict: an older JobSet that lacks a field would start again for ever.
    go kubectl create --namespace="$namespace" --validate=strict --filename=- \
      < <(manifest "$@")
    [ -z "$dry_run" ] || manifest "$@"
    ;;
  status)
    go kubectl get jobset "$name" --namespace="$namespace"
    go kubectl get pods --namespace="$namespace" --selector="$label"
    ;;
  logs)
    first=jobset.sigs.k8s.io/job-index=0
    first=$first,batch.kubernetes.io/job-completion-index=0
    go kubectl logs --namespace="$namespace" --selector="$label,$first" \
      --follow --tail=100
    ;;
  delete)
    go kubectl delete jobset "$name" --namespace="$namespace"
    go kubectl delete secret "$name-env" --namespace="$namespace" \
      --ignore-not-found
    ;;
  build)
    [ -n "$image" ] || refuse 'build needs --image.'
    build
    ;;
  help | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' launch/gke.sh ;;
  *) refuse "got '$command'; launch/gke.sh help lists the commands." ;;
esac
