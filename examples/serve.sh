#!/usr/bin/env bash
# Serve a DeepSeek-V4 checkpoint on loopback. The plugin is found by itself: no flag names it.
#
#   examples/serve.sh MODEL [any further flag of `vllm serve`]
#
# PORT chooses the port. --max-num-seqs is also the number of slots. VLLM_HOST_IP keeps vLLM's own
# sockets between its processes on loopback too.
set -euo pipefail
MODEL=${1:?usage: examples/serve.sh MODEL [flags of vllm serve]}
shift
export VLLM_HOST_IP=127.0.0.1
exec vllm serve "$MODEL" \
    --host 127.0.0.1 --port "${PORT:-8000}" \
    --served-model-name dsv4 \
    --max-model-len 2048 --max-num-seqs 8 \
    --kv-cache-memory-bytes $((256 << 20)) \
    --enforce-eager \
    "$@"
