"""A hand-made classification of the arguments of SGLang's server that users may set: why each is harmless.

An argument that a new release brings stands in none of these, and the test that reads them fails: somebody then decides
whether it changes what the model computes (``OWNED`` refuses it), or belongs to one of the kinds.
"""

# Drafts of several tokens that the model itself accepts or not; its own draft weights may be of any kind.
SPECULATION = """
    decoupled-spec-bind-endpoint decoupled-spec-connect-endpoints decoupled-spec-rank decoupled-spec-role
    enable-draft-weights-cpu-backup enable-multi-layer-eagle spec-trace-dir speculative-adaptive
    speculative-adaptive-config speculative-algorithm speculative-attention-mode speculative-dflash-block-size
    speculative-dflash-draft-window-size speculative-draft-attention-backend speculative-draft-load-format
    speculative-draft-model-path speculative-draft-model-quantization speculative-draft-model-revision
    speculative-draft-window-size speculative-dspark-align-verify-tokens-to-graph-tier
    speculative-dspark-block-size speculative-dspark-confidence-sts-path speculative-dspark-sps-table-path
    speculative-eagle-topk speculative-moe-a2a-backend speculative-moe-runner-backend speculative-ngram-capacity
    speculative-ngram-external-corpus-max-tokens speculative-ngram-external-corpus-path
    speculative-ngram-external-sam-budget speculative-ngram-match-type speculative-ngram-max-bfs-breadth
    speculative-ngram-max-trie-depth speculative-ngram-min-bfs-breadth speculative-num-draft-tokens
    speculative-num-steps speculative-skip-dp-mlp-sync speculative-token-map speculative-use-rejection-sampling
"""

# What is logged, measured, dumped and checked, and code of the user that a pass calls (``forward-hooks``).
WATCHING = """
    bucket-e2e-request-latency bucket-inter-token-latency bucket-time-to-first-token collect-tokens-histogram
    crash-dump-folder debug-cuda-graph debug-tensor-dump-layers debug-tensor-dump-output-folder
    decode-log-interval enable-cache-report enable-expert-distribution-metrics enable-forward-pass-metrics
    enable-layerwise-nvtx-marker enable-metrics enable-metrics-for-all-schedulers enable-mfu-metrics
    enable-profile-cuda-graph enable-request-time-stats-logging enable-torch-compile-debug-mode enable-trace
    expert-distribution-recorder-buffer-size expert-distribution-recorder-mode export-metrics-to-file
    export-metrics-to-file-dir extra-metric-labels forward-hooks forward-pass-metrics-ipc-name
    forward-pass-metrics-worker-id
    gc-threshold gc-warning-threshold-secs generation-tokens-buckets kv-canary kv-canary-real-data
    kv-canary-sweep-interval kv-events-config load-snapshot-publish-interval log-level log-level-http
    log-requests log-requests-format log-requests-level log-requests-target model-checksum msprobe-dump-config
    otlp-traces-endpoint prefill-delayer-forward-passes-buckets prefill-delayer-wait-seconds-buckets
    prompt-tokens-buckets show-time-cost soft-watchdog-timeout tokenizer-metrics-allowed-custom-labels
    tokenizer-metrics-custom-labels-header trace-modules uvicorn-access-log-exclude-prefixes watchdog-timeout
"""

# Of servers that prefill or encode for others, and elastic ones: of no effect in ours.
OTHER_ROLES = """
    checkpoint-engine-wait-weights-before-ready disaggregation-bootstrap-port
    disaggregation-decode-enable-offload-kvcache disaggregation-decode-enable-radix-cache
    disaggregation-decode-extra-slots disaggregation-decode-polling-interval disaggregation-ib-device
    disaggregation-transfer-backend dwdp-size elastic-ep-backend elastic-ep-initial-size elastic-ep-join-mode
    elastic-ep-join-rank-offset elastic-ep-rejoin elastic-ep-scale-timeout enable-adaptive-dispatch-to-encoder
    enable-elastic-expert-backup encoder-bootstrap-port encoder-transfer-backend engine-info-bootstrap-port
    mm-enable-dp-encoder smg-http-sidecar-port
"""

# How the same kernels are launched.
GRAPHS_AND_COMPILERS = """
    cuda-graph-backend-decode cuda-graph-backend-prefill cuda-graph-bs cuda-graph-bs-decode
    cuda-graph-bs-prefill cuda-graph-config cuda-graph-max-bs cuda-graph-max-bs-decode cuda-graph-max-bs-prefill
    cuda-graph-tc-compiler disable-cuda-graph disable-cuda-graph-padding disable-decode-cuda-graph
    disable-piecewise-cuda-graph disable-prefill-cuda-graph enable-breakable-cuda-graph enable-cudagraph-gc
    enable-torch-compile enforce-piecewise-cuda-graph piecewise-cuda-graph-compiler
    piecewise-cuda-graph-max-tokens piecewise-cuda-graph-tokens torch-compile-max-bs
"""

# Which kernel computes the same formula, in the same precision or a higher one.
KERNELS = """
    attention-backend bf16-gemm-backend dcp-comm-backend decode-attention-backend deepep-config deepep-mode
    disable-custom-all-reduce disable-flashinfer-autotune disable-flashinfer-cutlass-moe-fp4-allgather
    disable-overlap-schedule disable-shared-experts-fusion dsa-decode-backend dsa-paged-mqa-logits-backend
    dsa-prefill-backend dsa-prefill-cp-mode dsa-topk-backend enable-aiter-allreduce-fusion
    enable-attn-tp-input-scattered enable-deterministic-inference enable-dsa-cache-layer-split
    enable-dsa-prefill-context-parallel enable-flashinfer-allreduce-fusion enable-fp32-lm-head
    enable-fused-moe-sum-all-reduce enable-fused-qk-norm-rope enable-gdn-replayssm-spec enable-linear-replayssm
    enable-linear-replayssm-spec enable-mscclpp enable-nccl-nvls enable-nsa-prefill-context-parallel
    enable-p2p-check enable-scattered-sconv enable-single-batch-overlap enable-symm-mem enable-torch-symm-mem
    enable-two-batch-overlap enable-waterfill enforce-disable-flashinfer-allreduce-fusion
    enforce-shared-experts-fusion flashinfer-allreduce-fusion-backend flashinfer-autotune-skip-ops
    flashinfer-mla-disable-ragged fp4-gemm-backend fp8-gemm-backend fuseep-mode grammar-backend
    hicache-io-backend linear-attn-backend linear-attn-decode-backend linear-attn-prefill-backend
    linear-attn-verify-backend linear-replayssm-cache-len mamba-backend mm-attention-backend moe-a2a-backend
    moe-runner-backend nsa-decode-backend nsa-prefill-backend nsa-prefill-cp-mode pre-warm-nccl
    prefill-attention-backend radix-cache-backend rl-on-policy-target sampling-backend sm-group-num
    tbo-token-distribution-threshold tokenizer-backend triton-attention-num-kv-splits
    triton-attention-reduce-in-fp32 triton-attention-split-tile-size
"""

# How the GPUs of one engine share the work, and where experts lie.
PARALLELISM = """
    attn-cp-size batch-notify-size chunked-prefill-size cp-strategy dcp-replicate-q-proj dcp-size
    disable-attn-tp-gather dist-timeout dynamic-batch-tokenizer-batch-size enable-cp-decode-attn-tp
    enable-dp-attention enable-dp-attention-local-control-broadcast enable-dp-lm-head enable-eplb
    enable-prefill-context-parallel enable-prefill-cp ep-dispatch-algorithm ep-num-redundant-experts ep-size
    eplb-algorithm eplb-min-rebalancing-utilization-threshold eplb-rebalance-layers-per-chunk
    eplb-rebalance-num-iterations hicache-size init-expert-location load-balance-method max-ep-size
    max-mamba-cache-size moe-dense-tp-size moe-dp-size numa-node offload-group-size page-size
    pp-async-batch-depth pp-max-micro-batch-size prefill-cp-mode prefill-round-robin-balance
"""

# How inputs that are no text travel to the model.
MULTIMODAL_SPEED = """
    asr-max-buffer-seconds asr-max-concurrent-sessions enable-broadcast-mm-inputs-process enable-mm-global-cache
    enable-multimodal enable-prefix-mm-cache keep-mm-feature-on-device limit-mm-data-per-request
    mm-feature-transport mm-io-worker-num mm-processor-worker-num
"""

# What is kept where, and how much of it.
MEMORY = """
    context-length cpu-offload-gb disable-chunked-prefix-cache disable-hybrid-swa-memory
    disable-outlines-disk-cache disable-radix-cache enable-hierarchical-cache enable-page-major-kv-layout
    enable-session-radix-cache enable-unified-memory enable-weights-cpu-backup hicache-mem-layout hicache-ratio
    hicache-write-policy mamba-full-memory-ratio mamba-max-states-per-path mamba-radix-cache-strategy
    mamba-scheduler-strategy mamba-track-interval max-running-requests max-total-tokens
    num-reserved-decode-tokens offload-mode offload-num-in-group offload-prefetch-step radix-eviction-policy
    strip-thinking-cache swa-full-tokens-ratio weight-loader-disable-mmap weight-loader-drop-cache-after-load
    weight-loader-prefetch-checkpoints weight-loader-prefetch-num-threads
"""

# Which request runs when.
SCHEDULING = """
    abort-on-priority-when-disabled default-priority-value disable-priority-preemption enable-dynamic-chunking
    enable-mis enable-mixed-chunk enable-pdmux enable-prefill-delayer enable-priority-scheduling
    max-prefill-tokens max-queued-requests min-free-slots-delay num-continuous-decode-steps
    optimistic-prefill-attempts pdmux-config-path prefill-delayer-max-delay-ms prefill-delayer-max-delay-passes
    prefill-delayer-queue-min-ratio prefill-delayer-token-usage-low-watermark prefill-max-requests
    priority-scheduling-preemption-threshold retraction-policy schedule-conservativeness
    schedule-low-priority-values-first schedule-policy scheduler-recv-interval sleep-on-idle
"""

# Tokenizer, grammar, names and answers of the server; our client asks for none of it.
SERVING = """
    constrained-json-disable-any-whitespace constrained-json-whitespace-pattern detokenizer-worker-num
    disable-tokenizer-batch-decode download-dir dynamic-batch-tokenizer-batch-timeout
    enable-custom-logit-processor enable-dynamic-batch-tokenizer enable-return-hidden-states
    enable-return-indexer-topk enable-return-routed-experts enable-streaming-session
    enable-tokenizer-batch-encode fastapi-root-path file-storage-path mooncake-ib-device reasoning-parser
    return-hidden-states-mode served-model-name stream-response-default-include-usage
    tokenizer-mode tool-call-parser tool-server trust-remote-code warmups
"""

HARMLESS = {
    "speculation": SPECULATION.split(),
    "watching": WATCHING.split(),
    "other roles": OTHER_ROLES.split(),
    "graphs and compilers": GRAPHS_AND_COMPILERS.split(),
    "kernels": KERNELS.split(),
    "parallelism": PARALLELISM.split(),
    "multimodal speed": MULTIMODAL_SPEED.split(),
    "memory": MEMORY.split(),
    "scheduling": SCHEDULING.split(),
    "serving": SERVING.split(),
}
