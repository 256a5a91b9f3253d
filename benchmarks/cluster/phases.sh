# What a recipe does, phase after phase. Sourced by torchrun.sh and slurm.sbatch, which define
#
#   launch all|half MODULE ARGUMENTS...     run MODULE on all ranks, or on half as many
#   launch one MODULE ARGUMENTS...          run MODULE in a single process, without a process group
#
# and set RECIPE, OUT and EVERY. A phase that has left its part is not run again, and a training phase that was broken
# off goes on from its newest checkpoint: start the same script again after a preemption.

COMMON=(--recipe "$RECIPE" --out "$OUT" --seed "${SEED:-0}" --parameters "${PARAMETERS:-auto}" --replicas "${REPLICAS:-1}")
TRAIN=(--every "$EVERY" --raw-mib "${RAW_MIB:-1024}" --in-flight "${IN_FLIGHT:-1}")
[ -z "${BATCH:-}" ] || TRAIN+=(--batch "$BATCH")
[ -z "${LENGTH:-}" ] || TRAIN+=(--length "$LENGTH")

has_part() {
  [ -e "$OUT/parts/$1.json" ]
}

say() {
  echo "== $(date +%T) $*"
}

run_phases() {
  mkdir -p "$OUT"

  has_part reference || {
    say "reference: an uninterrupted run, measured"
    launch all benchmarks.cluster.train "${COMMON[@]}" --experts "${EXPERTS:-1}" "${TRAIN[@]}" \
      --which reference --steps $((EVERY * ${PERIODS:-8}))
  }
  has_part crash || {
    say "interrupted: the same again, killed (the launcher complains)"
    ! launch all benchmarks.cluster.train "${COMMON[@]}" --experts "${EXPERTS:-1}" "${TRAIN[@]}" \
      --which interrupted --steps $((EVERY * 4)) --crash-at $((EVERY * 3 + 1)) || { say "it was to be killed"; return 1; }
    has_part crash || { say "it did not get as far as being killed"; return 1; }
  }
  has_part interrupted || {
    say "interrupted: resumed"
    launch all benchmarks.cluster.train "${COMMON[@]}" --experts "${EXPERTS:-1}" "${TRAIN[@]}" \
      --which interrupted --steps $((EVERY * 4))
  }
  has_part reloaded || {
    say "reloaded: on half as many ranks"
    launch half benchmarks.cluster.reload "${COMMON[@]}" --experts "${EXPERTS_OF_HALF:-1}"
  }
  has_part read-back || {
    say "read back: from_pretrained"
    launch one benchmarks.cluster.read_back "${COMMON[@]}"
  }
  say "report"
  "$PYTHON" -m benchmarks.cluster.report --out "$OUT"
}
