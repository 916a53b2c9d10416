#!/usr/bin/env bash
# Pretraining on a TPU pod slice of TPU VMs: NAME=my-pod ZONE=us-central2-b examples/jobs/pretrain-tpu.sh
# A process on each host; JAX finds the others by what the TPU's own runtime says. See docs/guide/tpu-pods.md.
set -euo pipefail

NAME=${NAME:?the name of the TPU}
ZONE=${ZONE:?its zone}
FOLDER=${FOLDER:?the folder of the run that all hosts see, as a mounted bucket or NFS}
MOST_RESTARTS=${MOST_RESTARTS:-20}

# On every host; a process that is left of the last start holds the TPU.
command="cd ~/alpa_lite && source ~/venv/bin/activate && export JAX_COMPILATION_CACHE_DIR='$FOLDER/compiled' &&
exec python -u examples/pretrain.py --folder '$FOLDER/gpt' --steps 100000 --batch 1024 --seq 1024 --hidden 1024 \
--layers 24 --heads 16 --save-every 500 --evaluate-every 1000 --heartbeat-timeout 60 --end-after 1800"

for restart in $(seq 0 "$MOST_RESTARTS"); do
  echo "start $restart"
  if gcloud compute tpus tpu-vm ssh "$NAME" --zone "$ZONE" --worker=all --command="$command"; then
    exit 0
  fi
  gcloud compute tpus tpu-vm ssh "$NAME" --zone "$ZONE" --worker=all \
    --command="pkill --signal KILL --full '[e]xamples/pretrain.py' || true"
done
echo "started again $MOST_RESTARTS times" >&2
exit 1
