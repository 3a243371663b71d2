#!/usr/bin/env bash
# Everything that waits for an SM100 or SM103 card, in one command:
#
#     benchmarks/b200.sh VARIANT [FOLDER]
#
# VARIANT is a built CUDA variant (python tools/build.py cuda), FOLDER where the logs go (default b200-<date>). Order: what card
# it is; every GPU test; the sanitizer's tools, if compute-sanitizer is there; the emulator's records against the card; then the
# benchmarks, into FOLDER/b200.json; last the cycle model's predictions. A step that fails does not stop the others, and nothing is
# timed unless the tests of correctness passed. Needs the packages of requirements-test.txt. Exit status: the number of failed steps.
set -u
variant=$(realpath "${1:?usage: benchmarks/b200.sh VARIANT [FOLDER]}")
folder=${2:-b200-$(date +%Y-%m-%d)}
mkdir -p "$folder"
folder=$(realpath "$folder")
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
summary=$folder/summary.txt
: >"$summary"

step() { # step NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS status
  shift 2
  if declare -F "$1" >/dev/null; then "$@"; else timeout "$limit" "$@"; fi >"$folder/$name.log" 2>&1
  status=$?
  if [ $status -eq 0 ]; then echo "ok      $((SECONDS - start)) s  $name"; else
    echo "FAILED  $((SECONDS - start)) s  $name (status $status, $folder/$name.log)"
  fi | tee -a "$summary"
  return $status
}

device=sm_100
card() {
  nvidia-smi
  nvidia-smi -q -d CLOCK,POWER
  git log -1 --format='%H %s' 2>/dev/null
  sha256sum "$variant"/*.so "$variant/metadata.json"
  "$python" - <<'EOF'
import sys, torch
print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(), torch.cuda.get_device_capability())
print(torch.cuda.get_device_properties(0))
sys.exit(torch.cuda.get_device_capability() not in ((10, 0), (10, 3)))
EOF
}

if ! step card 120 card; then
  echo "This is no card of compute capability 10.0 or 10.3; stopped." | tee -a "$summary"
  exit 1
fi
if grep -q '(10, 3)' "$folder/card.log"; then device=sm_103; fi
step tests 3600 "$python" -m pytest tests/gpu -q -rs --variant "$variant"
right=$?
step sweep 600 "$python" tests/gpu/sanitizer_sweep.py --variant "$variant" || right=1
if command -v compute-sanitizer >/dev/null; then
  step sanitizer 7200 "$python" tests/gpu/sanitizer_sweep.py --variant "$variant" --log "$folder/sanitizer-reports.txt"
else
  echo "left    no compute-sanitizer on the PATH" | tee -a "$summary"
fi
step agreement 3600 "$python" tests/ptx_emulator/agreement.py both --variant "$variant" --device $device
if [ $right -eq 0 ]; then
  rows=$folder/b200.json
  for name in benchmark benchmark_store benchmark_combine; do
    step "$name" 1200 "$python" "benchmarks/$name.py" --variant "$variant" --results "$rows"
  done
  step benchmark_decode 2400 "$python" benchmarks/benchmark_decode.py --variant "$variant" --results "$rows" --seconds 2000
  step benchmark_select 2400 "$python" benchmarks/benchmark_select.py --variant "$variant" --results "$rows"
  step benchmark_prefill 2400 "$python" benchmarks/benchmark_prefill.py --variant "$variant" --results "$rows" --seconds 2000
  step benchmark_dense 1200 "$python" benchmarks/benchmark_dense.py --variant "$variant" --results "$rows"
else
  echo "left    the benchmarks: a result is wrong" | tee -a "$summary"
fi
step model 120 "$python" benchmarks/cycle_model.py --b200
nvidia-smi -q -d CLOCK,POWER,PERFORMANCE >"$folder/card-after.log" 2>&1
failed=$(grep -c '^FAILED' "$summary")
echo "$failed steps failed; everything is in $folder"
exit "$failed"
