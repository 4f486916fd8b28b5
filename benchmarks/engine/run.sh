#!/usr/bin/env bash
# SGLang with and without the plugin on one GPU:
#     bash benchmarks/engine/run.sh tokens|lengths|tiers|tp|talks|faults|kit|speed|ablation|capacity|offline|chains|shares|online|online9b [PARTS]
# tokens: MODEL (a trained hybrid with an MTP head) by plain decoding, SGLang's trees and ours, at once:
#         greedy tokens, accepted lengths, and the law of SAMPLES answers at temperature 1.
#         TREES (steps,topk,nodes ...) and NEW_TOKENS make it shorter.
# lengths: MODEL with the plugin by TREES, beside plain decoding and SGLang's chain: tokens and accepted lengths.
# tiers: MODEL with trees by batch size, plain decoding at the largest.
# tp: MODEL over two GPUs, tensor parallel: as tokens, without samples.
# talks: MODEL in conversations, prefix cache on.
# faults: errors injected into allocation, verify and commit must stop the server.
# kit: SGLang's own attention test kit, without and with the plugin; KIT: a folder with its test folder.
# speed: random weights at Qwen3.5-9B's shapes; accepted lengths simulated,
#        engines start together and measure one by one.
# ablation: the same with SGLang's trees, the plugin with a state stored for every node, and the plugin,
#        a wave for each of TREES.
# capacity: KV tokens of a server that has half of the GPU, without and with the plugin.
# offline: decoding by batch and context, random weights at MODEL_SHAPE (4b, 9b, 27b), acceptance simulated.
#         LAYERS; CONTEXTS ("TOKENS:BATCH,... ..."); SYSTEMS: what starts together, " / " before the next to start.
# chains: the same of chains, SGLang's and ours, of trees by batch size and of plain decoding with the plugin.
#         TIERS (as BOLEGEN_TIERS): the trees, here and in online.
# shares: MODEL_SHAPE at half its depth (27b: an eighth): what part of a target pass the linear layers take, by TREES.
# online: MODEL under conversations that arrive at three loads, measured one by one, answers checked.
#         SYSTEMS, TREE, RATE (conversations a second), SEEDS, TALKS and MEMORY (engine arguments) change it.
# online9b: the same at 9B shapes in a share of the memory, acceptance simulated; VOUCHERS: what `online` kept.
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
# the plugin as an installed distribution: SGLang looks for its entry point
plugin="$home/plugin"
mkdir -p "$plugin/bolegen-0.0.0.dist-info"
ln -sfn "$root/bolegen" "$plugin/bolegen"
ln -sfn "$root/runtime/bolegen_runtime" "$plugin/bolegen_runtime"
ln -sfn "$root/benchmarks" "$plugin/benchmarks"
printf 'Metadata-Version: 2.1\nName: bolegen\nVersion: 0.0.0\n' >"$plugin/bolegen-0.0.0.dist-info/METADATA"
printf '[sglang.srt.plugins]\n%s\n%s\n' 'bolegen = bolegen_runtime.sglang:register' \
    'bolegen_probe = benchmarks.engine.probe:register' >"$plugin/bolegen-0.0.0.dist-info/entry_points.txt"
export PYTHONPATH="$plugin${PYTHONPATH:+:$PYTHONPATH}"
export BOLEGEN_CACHE_DIR="$home/cache/bolegen"
export HOST_IP=127.0.0.1 SGLANG_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
# trees by batch size, and the tree of the fewest requests: its steps are those that a server starts with
tiers="${TIERS:-1:8x64 4:6x24 16:5x16}"
first="${tiers%% *}"
first="${first#*:}"
tiers_tree="${first/x/,4,}"
results="$home/results-$what"
rm -rf "$results"
mkdir -p "$results"
drive() { # LABEL ARGUMENTS...
    label="$1"
    shift
    began=$SECONDS
    timeout -k 5 "${LIMIT:-520}" python3 "$root/benchmarks/${driver:-engine/drive.py}" --out "$results/$label.json" "$@" \
        >"$results/$label.log" 2>&1 </dev/null
    rc=$?
    echo $rc $((SECONDS - began)) >"$results/$label.rc"
    touch "$results/$label.ready" # nobody waits for one that failed
    echo "== $label: exit $rc"
    grep -hoE 'Mamba Cache is allocated.*|bolegen (verifies|has nothing).*|max_total_num_tokens=[0-9]+' \
        "$results/$label.log" | sort -u | head -6
    [ $rc -eq 0 ] || grep -vE '^\s*$' "$results/$label.log" | cut -c1-300 | tail -25
}
length_of() { # TREE: what the trained model accepts in eight requests, as `tokens` and `lengths` measured
    case $1 in
    4,1,5) echo 4.0 ;;
    4,4,5) echo 3.7 ;;
    4,4,8) echo 4.0 ;;
    5,4,8) echo 4.4 ;;
    4,4,16) echo 4.3 ;;
    5,4,16) echo 4.9 ;;
    6,4,24) echo 5.5 ;;
    6,4,32 | 6,4,40) echo 5.6 ;;
    8,4,64) echo 7.0 ;;
    *) echo "run.sh: no accepted length was measured for trees of $1: run lengths with TREES=$1 and add it" >&2 && exit 2 ;;
    esac
}
lengths_of() { # TIERS: the same by draft steps
    for tier in $1; do
        shape="${tier#*:}"
        [ "$shape" = 0 ] && continue
        length="$(length_of "${shape/x/,4,}")" || exit 2
        echo "${shape%x*}:$length"
    done
}
simulate() { # LABEL ARGUMENTS...: a system by its label, at the accepted lengths of its trees
    system="$1" tree="${1#*-}" own=()
    shift
    IFS=, read -r steps _ nodes <<<"$tree"
    case $system in
    ar) ;;
    tiers-*) own=(--tree "$tree" --tiers "$tiers" --accept "$(lengths_of "$tiers")" --plugin) ;;
    plain-*) own=(--tree "$tree" --tiers "1:${steps}x$nodes 2:0" --accept "$steps:$(length_of "$tree")" --plugin) ;;
    chain-* | stock-*) own=(--tree "$tree" --accept "$(length_of "$tree")") ;;
    ours-* | states-*) own=(--tree "$tree" --accept "$(length_of "$tree")" --plugin) ;;
    esac
    case $system in states-*) export BOLEGEN_SNAPSHOTS=1 ;; esac
    drive "$system" "$@" "${own[@]}"
}
together() { # SYSTEMS ARGUMENTS...: start them at once and measure one by one; "/" ends those that start together
    wave=() started=0 simulated=()
    for system in $1 /; do
        case $system in
        ar | chain-* | stock-* | states-* | ours-* | tiers-* | plain-*)
            [ "$system" = ar ] || length_of "${system#*-}" >/dev/null || exit 2
            wave+=("$system") simulated+=("$system")
            ;;
        /)
            started=$((started + ${#wave[@]}))
            for one in "${wave[@]}"; do simulate "$one" "${@:2}" --peers "$started" & done
            wait
            wave=()
            ;;
        *) echo "run.sh: SYSTEMS: expected ar, or chain, stock, states, ours, tiers, plain with -TREE, or /, got $system" >&2 && exit 2 ;;
        esac
    done
    files=()
    for one in "${simulated[@]}"; do files+=("$results/$one.json"); done
}
online() { # ARGUMENTS...: every one of SYSTEMS with them, together where PEERS is set
    driver=serving/serve.py
    tree="${TREE:-6,4,40}"
    systems="${SYSTEMS:-ar chain replayssm stock ours}"
    online_files=()
    for system in $systems; do
        case $system in
        ar) label=ar own=(${MARGINS:-}) ;;
        chain) label=chain-4,1,5 own=(--tree 4,1,5 ${CHAIN_ACCEPT:-}) ;;
        replayssm) label=replayssm-4,1,5 own=(--tree 4,1,5 --replayssm ${CHAIN_ACCEPT:-}) ;;
        stock) label="stock-$tree" own=(--tree "$tree" ${TREE_ACCEPT:-}) ;;
        ours) label="ours-$tree" own=(--tree "$tree" --plugin ${TREE_ACCEPT:-}) ;;
        tiers)
            label="tiers-$tiers_tree" own=(--tree "$tiers_tree" --tiers "$tiers" --plugin)
            [ -n "${TREE_ACCEPT:-}" ] && own+=(--accept "$(lengths_of "$tiers")")
            ;;
        *) echo "run.sh: SYSTEMS: expected ar, chain, replayssm, stock, ours, tiers, got $system" >&2 && exit 2 ;;
        esac
        online_files+=("$results/$label.json")
        if [ -n "${PEERS:-}" ]; then
            drive "$label" "$@" "${own[@]}" --log "$results/$label.log" --peers "$(wc -w <<<"$systems")" &
        else
            drive "$label" "$@" "${own[@]}" --log "$results/$label.log"
        fi
    done
    wait
    cp "${online_files[@]}" "$OUT/"
}
keep() { # ARGUMENTS...: check, print, and keep the records that were checked
    python3 "$root/benchmarks/serving/report.py" "${online_files[@]}" --keep "$OUT" "$what" "$@"
}
case "$what" in
tokens)
    share='{"mem_fraction_static": 0.6, "max_total_tokens": 32768}'
    common=(--model "$MODEL" --new-tokens "${NEW_TOKENS:-1100}" --batch 1,4,8 --extra "$share" --samples "${SAMPLES:-3000}")
    drive ar "${common[@]}" --margins &
    trees="${TREES:-4,3,16 6,4,32 ngram,4,16}"
    for tree in $trees; do
        drive "stock-$tree" "${common[@]}" --tree "$tree" &
        drive "ours-$tree" "${common[@]}" --tree "$tree" --plugin &
    done
    # a chain's accepted length, to set beside the trees'
    drive stock-4,1,5 "${common[@]}" --tree 4,1,5 &
    wait
    files=("$results/ar.json")
    for tree in $trees; do files+=("$results/stock-$tree.json" "$results/ours-$tree.json"); done
    files+=("$results/stock-4,1,5.json")
    python3 "$root/benchmarks/engine/report.py" "${files[@]}"
    ;;
lengths)
    share='{"mem_fraction_static": 0.6, "max_total_tokens": 32768}'
    common=(--model "$MODEL" --new-tokens "${NEW_TOKENS:-1100}" --batch 1,4,8 --extra "$share")
    drive ar "${common[@]}" --margins &
    drive stock-4,1,5 "${common[@]}" --tree 4,1,5 &
    files=("$results/ar.json" "$results/stock-4,1,5.json")
    for tree in ${TREES:-4,1,5 4,4,5 4,4,8 5,4,8 4,4,16 5,4,16 6,4,24 6,4,40 8,4,64}; do
        drive "ours-$tree" "${common[@]}" --tree "$tree" --plugin &
        files+=("$results/ours-$tree.json")
    done
    wait
    python3 "$root/benchmarks/engine/report.py" "${files[@]}"
    ;;
tiers)
    share='{"mem_fraction_static": 0.6, "max_total_tokens": 32768}'
    common=(--model "$MODEL" --new-tokens "${NEW_TOKENS:-1100}" --batch 1,4,8 --extra "$share")
    drive ar "${common[@]}" --margins &
    drive ours-tiers "${common[@]}" --tree 6,4,32 --tiers "1:6x32 4:4x16 8:0" --plugin &
    wait
    files=("$results/ar.json" "$results/ours-tiers.json")
    python3 "$root/benchmarks/engine/report.py" "${files[@]}"
    ;;
tp)
    share='{"mem_fraction_static": 0.6, "max_total_tokens": 32768, "tp_size": 2, "disable_custom_all_reduce": true}'
    common=(--model "$MODEL" --new-tokens "${NEW_TOKENS:-1100}" --batch 1,4,8 --extra "$share")
    drive ar "${common[@]}" --margins &
    tree=6,4,32
    drive "stock-$tree" "${common[@]}" --tree "$tree" &
    drive "ours-$tree" "${common[@]}" --tree "$tree" --plugin &
    wait
    files=("$results"/{ar,stock-"$tree",ours-"$tree"}.json)
    python3 "$root/benchmarks/engine/report.py" "${files[@]}"
    ;;
talks)
    share='{"mem_fraction_static": 0.6, "max_total_tokens": 65536, "max_mamba_cache_size": 96}'
    common=(--model "$MODEL" --new-tokens 300 --batch 8 --turns 4 --extra "$share")
    drive ar "${common[@]}" --margins &
    drive stock "${common[@]}" --tree 4,3,16 &
    drive ours "${common[@]}" --tree 4,3,16 --plugin &
    wait
    files=("$results"/{ar,stock,ours}.json)
    python3 "$root/benchmarks/engine/report.py" "${files[@]}"
    ;;
faults)
    share='{"mem_fraction_static": 0.6, "max_total_tokens": 32768, "disable_decode_cuda_graph": true}'
    for fault in allocate:1 verify:40 commit:10; do
        BOLEGEN_FAULT=$fault drive "fault-${fault%:*}" --model "$MODEL" --new-tokens 200 --batch 4 --tree 4,3,16 --plugin \
            --extra "$share" >/dev/null &
    done
    wait
    for name in allocate verify commit; do
        read -r rc seconds <"$results/fault-$name.rc"
        said=$(grep -ho "injected fault: $name.*" "$results/fault-$name.log" | head -1)
        echo "$name: exit $rc after $seconds s, log: $said"
        # it stopped by itself, said why, and answered nothing
        [ -n "$said" ] && [ "$rc" -ne 0 ] && [ "$seconds" -lt "${LIMIT:-520}" ] &&
            [ ! -e "$results/fault-$name.json" ] || failed=1
    done
    [ -z "${failed:-}" ]
    ;;
kit)
    failed=0
    for mode in stock ours; do
        flag=()
        [ $mode = ours ] && flag=(--plugin)
        (cd "$root" && PYTHONPATH="$root:$PYTHONPATH" timeout -k 5 "${LIMIT:-250}" python3 -m benchmarks.engine.kit \
            ${KIT:+--kit "$KIT"} --out "$results/$mode.json" "${flag[@]}") >"$results/$mode.log" 2>&1 &
    done
    wait
    files=("$results"/{stock,ours}.json)
    for mode in stock ours; do
        grep '^{' "$results/$mode.log" || tail -25 "$results/$mode.log"
        tail -1 "$results/$mode.log" | grep -q '"failed": 0}' || failed=1
    done
    [ $failed -eq 0 ]
    ;;
speed | ablation)
    python3 "$root/benchmarks/engine/shapes.py" "$home/m_9b"
    share='{"mem_fraction_static": 0.97, "max_total_tokens": 16384, "load_format": "dummy", "sleep_on_idle": true}'
    common=(--model "$home/m_9b" --new-tokens 200 --batch 1,4,8,16 --requests 16 --repeats 5 --extra "$share")
    # in waves, to fit into memory
    systems="ar stock-4,1,5 stock-4,4,16 ours-4,4,16 / stock-6,4,40 ours-6,4,40 / stock-8,4,64 ours-8,4,64"
    if [ $what = ablation ]; then
        systems=ar
        case "${TREES:- }" in *" "*) ;; *) kept="ablation-${TREES##*,}" ;; esac
        for tree in ${TREES:-4,4,16 6,4,40}; do systems+=" stock-$tree states-$tree ours-$tree /"; done
    fi
    together "$systems" "${common[@]}"
    python3 "$root/benchmarks/engine/$what.py" "${files[@]}"
    ;;
capacity)
    alone='{"mem_fraction_static": 0.5, "load_format": "dummy", "disable_decode_cuda_graph": true}'
    python3 "$root/benchmarks/engine/shapes.py" "$home/m_small" small
    common=(--model "$home/m_small" --new-tokens 8 --batch 1 --requests 48 --tree 8,4,64 --extra "$alone")
    LIMIT=250 drive stock "${common[@]}"
    LIMIT=250 drive ours "${common[@]}" --plugin
    files=("$results"/{stock,ours}.json)
    ;;
offline | chains | shares)
    shape="${MODEL_SHAPE:-9b}"
    kept="$what-$shape"
    case $what-$shape in
    offline-27b) layers="${LAYERS:-20}" ;; # of 64: four engines, one with snapshots, in one GPU
    shares-27b) layers="${LAYERS:-8}" ;;
    shares-*) layers="${LAYERS:-16}" ;; # nine engines
    *) layers="${LAYERS:-}" ;;
    esac
    python3 "$root/benchmarks/engine/shapes.py" "$home/m_$shape" "$shape" ${layers:+--layers $layers} \
        --positions 65536
    if [ $what = offline ]; then
        systems="${SYSTEMS:-ar chain-4,1,5 stock-6,4,40 ours-6,4,40}"
        contexts="${CONTEXTS:-1024:1,2,4,8,16 8192:1,4,16 32768:1,4}"
        kernels="${KERNELS-1024:1,16}"
    elif [ $what = chains ]; then
        systems="${SYSTEMS:-ar chain-4,1,5 ours-4,1,5 tiers-$tiers_tree plain-6,4,40}"
        contexts="${CONTEXTS:-1024:1,4,8,16}"
        kernels="${KERNELS-}"
    else
        systems=ar
        for tree in ${TREES:-4,4,8 4,4,16 6,4,32 8,4,64}; do systems+=" stock-$tree ours-$tree"; done
        contexts="${CONTEXTS:-1024:1,8}"
        kernels="${KERNELS-$contexts}"
    fi
    # room for the largest point and for what each of its answers adds
    read -r requests length tokens < <(python3 "$root/benchmarks/engine/points.py" "$contexts $kernels")
    share='{"mem_fraction_static": 0.97, "load_format": "dummy", "sleep_on_idle": true, "stream_interval": 1000000,'
    share+=" \"max_total_tokens\": $tokens, \"context_length\": $length}"
    together "$systems" --model "$home/m_$shape" --contexts "$contexts" ${kernels:+--kernels "$kernels"} \
        --new-tokens "${NEW_TOKENS:-160}" --requests "$requests" --repeats "${REPEATS:-3}" --extra "$share"
    python3 "$root/benchmarks/serving/offline.py" "${files[@]}"
    ;;
online)
    # room for some requests' KV and states, and not for all conversations'
    share='{"mem_fraction_static": 0.6, "max_total_tokens": 20480, "max_mamba_cache_size": 80, "sleep_on_idle": true}'
    MARGINS=--margins PEERS=1 online --model "$MODEL" --requests 16 --rate "${RATE:-8}" --seeds "${SEEDS:-1}" \
        --talks "${TALKS:-24}" --think-s 0.5 --extra "${MEMORY:-$share}"
    keep
    ;;
online9b)
    python3 "$root/benchmarks/engine/shapes.py" "$home/m_9b"
    share='{"mem_fraction_static": 0.45, "load_format": "dummy"}'
    # accepted lengths are those that `tokens` measured
    CHAIN_ACCEPT="--accept $(length_of 4,1,5)" TREE_ACCEPT="--accept $(length_of "${TREE:-6,4,40}")" online --model "$home/m_9b" --requests 16 \
        --rate "${RATE:-4}" --seeds "${SEEDS:-1}" --talks "${TALKS:-24}" --think-s 0.5 --extra "${MEMORY:-$share}"
    keep ${VOUCHERS:+--vouchers "$VOUCHERS"}
    ;;
*)
    echo "run.sh: $what is not among tokens, lengths, tiers, tp, talks, faults, kit, speed, ablation, capacity, offline, chains, shares, online, online9b" >&2
    exit 2
    ;;
esac
status=$?
[ -n "${files:-}" ] && python3 "$root/benchmarks/engine/records.py" "$OUT" "${kept:-$what}" "${files[@]}"
tar -czf "$OUT/${kept:-$what}.tar.gz" -C "$results" .
[ -d "$home/cache" ] && tar -czf - -C "$home/cache" . | split -b 15M -d - "$OUT/cache.tar.gz."
exit $status
