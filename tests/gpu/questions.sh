#!/usr/bin/env bash
# Ask a GPU what only a GPU can answer: tests/gpu/questions.sh FOLDER [NAME ...]
#
# The questions are in the order of their value, each with its most seconds and what its answer decides; together they
# take 560 s at most. Names ask some of them. A GPU before Ampere (a T4) is asked the first three only. FOLDER gets
# answers.jsonl, the log of each question, its run, and runs.tar.gz, which is written again after every question.
# Models have random weights; nothing is downloaded. DEVICE=cpu asks a CPU about a small model, to test the script.
set -u
[ $# -gt 0 ] || { sed -n '2,8s/^# \?//p' "$0"; exit 2; }
mkdir -p "$1/runs"
out=$(cd "$1" && pwd) && shift
chosen=" $* " failed=0
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD DEVICE=${DEVICE:-cuda:0}
model=mistral-7b-v0.1 dtype=bfloat16 last= patience=1
if [ "$DEVICE" = cpu ]; then
    model=smollm2-135m dtype=float32 patience=5
elif [ "$(python -c 'import torch; print(torch.cuda.get_device_capability()[0])')" -lt 8 ]; then
    model=tinyllama-1.1b dtype=float16 last=prefill
fi
checks="python tests/gpu/acceptance.py --minutes 5"
[ "$DEVICE" != cpu ] || checks="$checks --dry-run"
# What changes a compiled step, and nothing else of the environment.
unset TORCHINDUCTOR_COORDINATE_DESCENT_TUNING TORCHINDUCTOR_MAX_AUTOTUNE TORCH_CUDNN_SDPA_DEPRIORITIZED
for name in CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF OMP_NUM_THREADS; do
    echo "$name=${!name-}"
done > "$out/environment.txt"

ask() { # NAME SECONDS DECIDES COMMAND...
    local name=$1 seconds=$2 decides=$3
    shift 3
    [ "$last" != done ] || return
    [ "$last" != "$name" ] || last=done
    [[ $chosen =~ ^\ +$ || $chosen == *" $name "* ]] || return
    echo "== $name: $decides"
    local start_s=$SECONDS
    timeout $((patience * seconds)) "$@" > "$out/$name.log" 2> "$out/$name.errors"
    local code=$?
    tail -c 3000 "$out/$name.log"
    local answer
    printf -v answer '{"question": "%s", "decides": "%s", "seconds": %d, "exit": %d}' \
        "$name" "$decides" $((SECONDS - start_s)) $code
    echo "$answer" | tee -a "$out/answers.jsonl"
    [ $code -eq 0 ] || { failed=1; tail -n 3 "$out/$name.errors"; }
    tar -czf "$out/runs.tar.gz" -C "$out" runs
}

run() { # NAME SECONDS DECIDES OPTIONS...
    local name=$1 seconds=$2 decides=$3
    shift 3
    ask "$name" "$seconds" "$decides" python -m profiler run $model --weights random --dtype $dtype --device "$DEVICE" \
        --no-trials --plain --out "$out/runs/$name" "$@"
}

compiled=graph,compile decoded=graph batches=1,8,64,256
[ "$DEVICE" != cpu ] || { compiled=static decoded=static batches=1,8; }
# shellcheck disable=SC2086  # words are split on purpose
{
    ask lines 110 "what the two printed lines do to a new process, and the seconds of compiling" \
        $checks --only lines --out "$out/runs/lines"
    run compile 110 "what a compiled step takes without tuning, next to a graph's: the computed range" \
        --prompt-lens 128 --batch-sizes 1 --new-tokens 32 --engine $compiled --budget 90
    ask prefill 60 "the arithmetic term of a prefill at its clock, and what fusing its small kernels saves" \
        $checks --only prefill --out "$out/runs/prefill"
    ask lines-nf4 45 "whether a line for nf4 may name a static cache, which is not compiled there" \
        $checks --only lines-nf4 --out "$out/runs/lines-nf4"
    ask counters 45 "what may be claimed of NVML's counters, and whether its joules are right for pulsed work" \
        $checks --only counters --out "$out/runs/counters"
    ask linears 45 "what each format's kernels save here, without the host" \
        $checks --only linears --out "$out/runs/linears"
    run decode 45 "the batch from which a step takes longer, and forecasts between replayed rows" \
        --prompt-lens 512 --batch-sizes $batches --new-tokens 16 --engine $decoded --budget 25
    run counted 40 "whether counted bytes of bf16 agree with the counters in loops of 2 s" \
        --prompt-lens 128 --batch-sizes 1,8 --new-tokens 128 --budget 20
    sed "s/\.eval()/.eval().to('$DEVICE')/; s/(2, 2, 40))/(2, 2, 40), device='$DEVICE')/" examples/answers.py \
        > "$out/answers.py"
    sed 's/use_cache=False/use_cache=True/; s/LENGTH = 128/LENGTH = 40/' "$out/answers.py" > "$out/answers-changed.py"
    ask why 60 "whether README's first claim holds on a GPU, and its two lines save what they promise" \
        bash -c "python -m profiler why --plain --budget 30 --out '$out/runs/why' '$out/answers.py' \
            && python '$out/answers.py' && python '$out/answers-changed.py'"
}
exit $failed
