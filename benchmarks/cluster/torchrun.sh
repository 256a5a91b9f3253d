#!/usr/bin/env bash
# Run a recipe on this machine: train, measure, kill, resume, reload, read back, report. See README.md.
#
#   benchmarks/cluster/torchrun.sh llama-8b /fast/disk/out                        # on all GPUs
#   EXPERTS=8 benchmarks/cluster/torchrun.sh qwen3-moe-30b-a3b /fast/disk/out
#   NPROC=2 EVERY=4 RAW_MIB=8 benchmarks/cluster/torchrun.sh tiny-dense out/tiny  # on a CPU, in a minute
#
# NPROC: ranks, an even number (the number of GPUs). EXPERTS: ranks among which experts are divided (1).
# EXPERTS_OF_HALF: the same when reloading on half as many ranks (1). REPLICAS: copies of the model (1); NPROC / 2 must
# still be a multiple of it. EVERY: steps between saves (20). PERIODS: how often (8). PARAMETERS: float32 or bfloat16.
# BATCH, LENGTH: what a rank trains on a step. IN_FLIGHT: captures a rank has host memory for (1). RAW_MIB: how much is
# written to measure the disk (1024). SEED (0). PYTHON (python3).
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(dirname "$(dirname "$HERE")")"
[ $# = 2 ] || { sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; }
RECIPE="$1"
OUT="$2"
EVERY="${EVERY:-20}"
PYTHON="${PYTHON:-python3}"
NPROC="${NPROC:-$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)}"
[ "$NPROC" -ge 2 ] && [ $((NPROC % 2)) = 0 ] || { echo "NPROC must be an even number of ranks, not $NPROC" >&2; exit 2; }
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

launch() {
  local ranks="$1"
  shift
  case "$ranks" in
    all) "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node="$NPROC" -m "$@" ;;
    half) "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node=$((NPROC / 2)) -m "$@" ;;
    one) "$PYTHON" -m "$@" ;;
  esac
}

source "$HERE/phases.sh"
run_phases
