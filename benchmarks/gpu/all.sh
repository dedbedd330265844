#!/bin/bash
# What has to hold on a GPU, measured with real vLLM: in OUT a file of JSON for each part, a plot,
# and all.log with what was said meanwhile.
#
#     all.sh OUT STORE [parts]      parts: device same peers ttft interference   (default: all but ttft)
#
# STORE: a folder on the file system that the store is to be on, with 60 GB of room (tmpfs shows the
# limit of the software). The peers need half of that in /dev/shm as well.
#
#     device        gather and scatter against plain copies
#     same          0.6B shape: every token loaded, answers equal to the engine's own hit
#     peers         8B shape: time to first token, beside the connectors that vLLM brings
#     ttft          the same without peers
#     interference  8B shape: prefill, decode, blocking calls, a slow store
#
# Environment: SHAPE (8b), LENGTHS (1000,5000,20000), PROMPTS (3), AGAINST (offloading,hf3fs), MODE
# (eager), SETTINGS and FERRY (JSON for vLLM and kvferry), LIMIT_S (of each part: 400).
# By default a prompt of 20,000 tokens is computed in one step, and two engines fit on one GPU.
set -u
OUT=${1:?usage: all.sh OUT STORE [parts]}
STORE=${2:?usage: all.sh OUT STORE [parts]}
shift 2
PARTS=${*:-device same peers interference}
SHAPE=${SHAPE:-8b}
LENGTHS=${LENGTHS:-1000,5000,20000}
PROMPTS=${PROMPTS:-3}
AGAINST=${AGAINST:-offloading,hf3fs}
MODE=${MODE:-eager}
SETTINGS=${SETTINGS:-'{"max_num_batched_tokens": 32768, "gpu_memory_utilization": 0.35}'}
FERRY=${FERRY:-"{}"}
LIMIT_S=${LIMIT_S:-400}
mkdir -p "$OUT" "$STORE"
failed=0

part() { # name, arguments of kvferry bench
    local name=$1 started=$SECONDS
    shift
    timeout -k 20 "$LIMIT_S" kvferry bench "$@" --json >"$OUT/$name.json" 2>"$OUT/part.log"
    local code=$?
    echo "$name: exit code $code after $((SECONDS - started)) s"
    [ $code = 0 ] || { failed=1; tail -n 15 "$OUT/part.log"; }
    grep -A 12 '"wrong": \[$' "$OUT/$name.json"
    { echo "== $name"; cat "$OUT/part.log"; } >>"$OUT/all.log"
    rm "$OUT/part.log"
}

engines() { # name, command, its other arguments
    local name=$1 command=$2 folder=$STORE/bench-$1
    shift 2
    mkdir -p "$folder"
    part "$name" "$command" "$folder" "$@" --settings "$SETTINGS" --ferry "$FERRY"
    rm -rf "$folder"
}

for what in $PARTS; do
    case $what in
    device) part device device ;;
    same) engines same ttft --shape 0.6b --lengths 1000,5000 --prompts 2 --mode "$MODE" ;;
    peers)
        engines peers ttft --shape "$SHAPE" --lengths "$LENGTHS" --prompts "$PROMPTS" \
            --mode "$MODE" --against "$AGAINST" --plot "$OUT/ttft.svg"
        ;;
    ttft)
        engines ttft ttft --shape "$SHAPE" --lengths "$LENGTHS" --prompts "$PROMPTS" \
            --mode "$MODE" --plot "$OUT/ttft.svg"
        ;;
    interference) engines interference interference --shape "$SHAPE" ;;
    *) echo "no such part: $what" && failed=1 ;;
    esac
done
exit $failed
