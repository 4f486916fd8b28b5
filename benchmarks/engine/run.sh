#!/usr/bin/env bash
# SGLang with and without the plugin on one GPU:
#     bash benchmarks/engine/run.sh tokens|speed|capacity [PARTS]
# tokens: MODEL (a trained hybrid with an MTP head) by plain decoding, SGLang's trees and ours, at once.
#         TREES (steps,topk,nodes ...) and NEW_TOKENS make it shorter.
# speed: random weights at KERNEL_MODEL's shapes; engines start together and measure one by one.
# capacity: KV tokens of a server that takes all it can, without and with the plugin.
# PARTS: a folder with a packed SGLang and its install_sglang.sh; without it SGLang must import.
# Results, logs and compiler caches are left in $OUT (default: out/engine).
set -u
what="$1"
parts="${2:-}"
root="$(cd "$(dirname "$0")/../.." && pwd)"
home="${BOLE_GPU_HOME:-${TMPDIR:-/tmp}/bole-gpu}"
OUT="${OUT:-$root/out/engine}"
mkdir -p "$OUT" "$home"
if [ -n "$parts" ]; then
    export BOLE_GPU_HOME="$home"
    . "$parts/install_sglang.sh" "$parts"
fi
MODEL="${MODEL:-$home/m_tiny}"
KERNEL_MODEL="${KERNEL_MODEL:-$home/m_kernel}"
# the plugin as an installed distribution: SGLang looks for its entry point
plugin="$home/plugin"
mkdir -p "$plugin/bolegen-0.0.0.dist-info"
ln -sfn "$root/bolegen" "$plugin/bolegen"
ln -sfn "$root/runtime/bolegen_runtime" "$plugin/bolegen_runtime"
printf 'Metadata-Version: 2.1\nName: bolegen\nVersion: 0.0.0\n' >"$plugin/bolegen-0.0.0.dist-info/METADATA"
printf '[sglang.srt.plugins]\nbolegen = bolegen_runtime.sglang:register\n' \
    >"$plugin/bolegen-0.0.0.dist-info/entry_points.txt"
export PYTHONPATH="$plugin${PYTHONPATH:+:$PYTHONPATH}"
export BOLEGEN_CACHE_DIR="$home/cache/bolegen"
export HOST_IP=127.0.0.1 SGLANG_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
results="$home/results-$what"
rm -rf "$results"
mkdir -p "$results"
drive() { # LABEL ARGUMENTS...
    label="$1"
    shift
    timeout -k 5 "${LIMIT:-520}" python3 "$root/benchmarks/engine/drive.py" --out "$results/$label.json" "$@" \
        >"$results/$label.log" 2>&1 </dev/null
    rc=$?
    touch "$results/$label.ready" # nobody waits for one that failed
    echo "== $label: exit $rc"
    grep -hoE 'Mamba Cache is allocated.*|bolegen (verifies|has nothing).*|max_total_num_tokens=[0-9]+' \
        "$results/$label.log" | sort -u | head -6
    [ $rc -eq 0 ] || grep -vE '^\s*$' "$results/$label.log" | cut -c1-300 | tail -25
}
case "$what" in
tokens)
    share='{"mem_fraction_static": 0.6, "max_total_tokens": 32768}'
    common=(--model "$MODEL" --new-tokens "${NEW_TOKENS:-1100}" --batch 1,4,8 --extra "$share")
    drive ar "${common[@]}" --margins &
    trees="${TREES:-4,3,16 6,4,32 ngram,4,16}"
    for tree in $trees; do
        drive "stock-$tree" "${common[@]}" --tree "$tree" &
        drive "ours-$tree" "${common[@]}" --tree "$tree" --plugin &
    done
    wait
    files=("$results/ar.json")
    for tree in $trees; do files+=("$results/stock-$tree.json" "$results/ours-$tree.json"); done
    python3 "$root/benchmarks/engine/report.py" "${files[@]}"
    ;;
speed)
    share='{"mem_fraction_static": 0.85, "max_total_tokens": 16384, "load_format": "dummy", "sleep_on_idle": true}'
    common=(--model "$KERNEL_MODEL" --new-tokens 96 --batch 1,8,16 --requests 16 --repeats 5 --peers 7 --extra "$share")
    drive ar "${common[@]}" &
    files=("$results/ar.json")
    for tree in 4,3,16 6,4,40 8,4,64; do
        drive "stock-$tree" "${common[@]}" --tree "$tree" &
        drive "ours-$tree" "${common[@]}" --tree "$tree" --plugin &
        files+=("$results/stock-$tree.json" "$results/ours-$tree.json")
    done
    wait
    python3 "$root/benchmarks/engine/report.py" --times-only "${files[@]}"
    ;;
capacity)
    alone='{"mem_fraction_static": 0.5, "load_format": "dummy", "disable_decode_cuda_graph": true}'
    common=(--model "$KERNEL_MODEL" --new-tokens 8 --batch 1 --requests 48 --tree 8,4,64 --extra "$alone")
    LIMIT=250 drive stock "${common[@]}"
    LIMIT=250 drive ours "${common[@]}" --plugin
    ;;
*)
    echo "run.sh: expected tokens, speed or capacity, got $what" >&2
    exit 2
    ;;
esac
status=$?
tar -czf "$OUT/$what.tar.gz" -C "$results" .
[ -d "$home/cache" ] && tar -czf - -C "$home/cache" . | split -b 15M -d - "$OUT/cache.tar.gz."
exit $status
