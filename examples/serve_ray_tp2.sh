#!/usr/bin/env bash
# Serve a DeepSeek-V4 checkpoint with tensor parallelism over Ray.
#
#   ray start --head --num-gpus 2          # on the CPU build a logical device is enough
#   examples/serve_ray_tp2.sh MODEL [any further flag of `vllm serve`]
#
# Joins the cluster of RAY_ADDRESS, or the one running on this machine. PORT chooses the port.
set -euo pipefail
MODEL=${1:?usage: examples/serve_ray_tp2.sh MODEL [flags of vllm serve]}
shift
exec vllm serve "$MODEL" \
    --host 127.0.0.1 --port "${PORT:-8000}" \
    --served-model-name dsv4 \
    --tensor-parallel-size 2 --distributed-executor-backend ray \
    --max-model-len 2048 --max-num-seqs 8 \
    --kv-cache-memory-bytes $((256 << 20)) \
    --enforce-eager \
    "$@"
