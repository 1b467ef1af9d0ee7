#!/usr/bin/env bash
# Train on all machines of a Cloud TPU slice, from a checkout of this package:
#   deploy/cloud_tpu.sh NAME ZONE wmt14_base --workdir /shared/runs/base
# NAME is a slice that exists: gcloud compute tpus tpu-vm create NAME --zone ZONE --accelerator-type v5litepod-16 \
#   --version v2-alpha-tpuv5-lite. The workdir must be on a file system that all its machines share. Each machine learns
# from the metadata server which one it is. Run the same command again to go on after a machine was lost.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 NAME ZONE [CONFIG] [FLAGS]" >&2
    exit 2
fi
name=$1 zone=$2
shift 2
cd "$(dirname "$0")/.."

archive=$(mktemp -d)
trap 'rm -rf "$archive"' EXIT
tar --exclude=.git --exclude=runs --exclude=__pycache__ -czf "$archive/transformer_jax.tgz" .

on_all_machines() {
    gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "$1"
}

gcloud compute tpus tpu-vm scp "$archive/transformer_jax.tgz" "$name:" --zone "$zone" --worker=all
on_all_machines 'mkdir -p transformer_jax && tar -xzf transformer_jax.tgz -C transformer_jax \
    && python3 -m venv --clear environment && environment/bin/pip install --quiet "./transformer_jax[tpu]"'

quoted=""
if [ $# -gt 0 ]; then
    quoted=$(printf ' %q' "$@")
fi
on_all_machines "environment/bin/python -m transformer_jax train$quoted"
