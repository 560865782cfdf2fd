#!/usr/bin/env bash
# Ask a GPU what only a GPU can answer: tests/gpu/questions.sh FOLDER [NAME ...]
#
# The questions are in the order of their value, each with its most seconds and what its answer decides; together they
# fit 15 minutes. Names ask some of them. FOLDER gets answers.jsonl, the log and the run of each, and runs.tar.gz, which is
# written again after every question. Models have random weights; nothing is downloaded.
set -u
[ $# -gt 0 ] || { sed -n '2,6s/^# \?//p' "$0"; exit 2; }
mkdir -p "$1/runs"
out=$(cd "$1" && pwd) && shift
chosen=" $* " failed=0
cd "$(dirname "$0")/../.."

ask() { # NAME SECONDS DECIDES OPTIONS...; the environment may have a variable more
    local name=$1 seconds=$2 decides=$3
    shift 3
    [[ $chosen =~ ^\ +$ || $chosen == *" $name "* ]] || return
    echo "== $name: $decides"
    local start_s=$SECONDS
    local mistral="mistral-7b-v0.1 --weights random --dtype bfloat16 --device cuda:0"
    # shellcheck disable=SC2086  # words are split on purpose
    timeout "$seconds" env ${variable:-} python -m profiler run $mistral "$@" --plain --out "$out/runs/$name" \
        > "$out/$name.log" 2>&1
    local code=$?
    tail -c 3000 "$out/$name.log"
    local answer
    printf -v answer '{"question": "%s", "decides": "%s", "seconds": %d, "exit": %d}' \
        "$name" "$decides" $((SECONDS - start_s)) $code
    echo "$answer" | tee -a "$out/answers.jsonl"
    [ $code -eq 0 ] || failed=1
    tar -czf "$out/runs.tar.gz" -C "$out" runs
}

single="--prompt-lens 128 --batch-sizes 1 --new-tokens 32 --no-levers"
ask default 90 "what the default minute answers" --new-tokens 32
ask window 85 "what changes save beyond a moving window, and that no trial loses the device" \
    --new-tokens 32 --context-lens 4096 --batch-sizes 1,16 --budget 60
ask counted 85 "whether the counters read more than nf4's bytes in a graph as well, which uses more bandwidth" \
    --new-tokens 128 --quant nf4 --prompt-lens 128 --batch-sizes 1,8 --engine eager,graph --no-levers --budget 60
ask compiled 120 "what a compiled step takes next to a graph's, on one GPU" $single --engine graph,compile --budget 90
variable=TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 \
    ask tuned 120 "what inductor's own matrix-vector products save of that" $single --engine compile --budget 90
variable=TORCH_CUDNN_SDPA_DEPRIORITIZED=1 \
    ask no-cudnn 60 "what a first use and a steady step cost without cuDNN's attention" $single --budget 35
exit $failed
