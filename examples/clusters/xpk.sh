#!/bin/bash
# The same slice as gke-jobset.yaml through xpk, on a cluster that xpk made. The image holds
# farspan[train,tpu]; /shared is a ReadWriteMany volume attached by `xpk storage`.
set -eu
xpk workload create \
  --cluster="$CLUSTER" --workload=farspan \
  --tpu-type=v5p-128 --num-slices=1 \
  --docker-image="$IMAGE" \
  --max-restarts=50 --restart-on-user-code-failure \
  --termination-grace-period-seconds=300 \
  --command="farspan train llama3_8b_long --data /shared/corpus.jsonl \
    --cache-dir /shared/cache --run-dir /shared/runs/farspan"
