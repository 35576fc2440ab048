"""Every name that telemetry uses: span attributes and metrics, of the engine and for the service. Imports nothing.

Attributes are those of the OpenTelemetry semantic conventions for generative AI (status: development, so a renaming
there is one line here), and ``pennyweight.*`` where they have none: for device time, for cost, for who.
Metrics are ``vllm:*`` for what vLLM also measures, meaning what it means there, so that its dashboards work on ours,
and ``pennyweight_*`` for the rest. prometheus-client adds ``_total`` to counters.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

PROVIDER: Final = "pennyweight"  # value of Attribute.PROVIDER: the conventions allow a name of one's own


class Attribute(StrEnum):
    """Keys of span attributes. Token counts of the conventions include cached tokens."""

    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    REQUEST_MODEL = "gen_ai.request.model"
    REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
    REQUEST_TEMPERATURE = "gen_ai.request.temperature"
    REQUEST_TOP_P = "gen_ai.request.top_p"
    REQUEST_TOP_K = "gen_ai.request.top_k"
    REQUEST_SEED = "gen_ai.request.seed"
    REQUEST_STREAM = "gen_ai.request.stream"
    RESPONSE_ID = "gen_ai.response.id"
    RESPONSE_MODEL = "gen_ai.response.model"
    RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
    RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
    USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
    USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    USAGE_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    ERROR_TYPE = "error.type"
    # Ours
    REQUEST_ID = "pennyweight.request.id"
    ATTEMPT = "pennyweight.attempt"
    OUTCOME = "pennyweight.outcome"
    TENANT = "pennyweight.tenant.id"
    API_KEY = "pennyweight.api_key.id"
    DEPLOYMENT = "pennyweight.deployment"
    REVISION = "pennyweight.revision"
    ROUTE = "pennyweight.route"
    ARM = "pennyweight.arm"
    OWNER = "pennyweight.owner"
    WORKER = "pennyweight.worker"
    DEVICE = "pennyweight.device"
    DEVICE_NS = "pennyweight.device_ns"
    USED_NS = "pennyweight.used_ns"
    WASTED_NS = "pennyweight.wasted_ns"
    QUEUE_NS = "pennyweight.queue_ns"
    KV_BLOCK_NS = "pennyweight.kv_block_ns"
    STEPS = "pennyweight.steps"
    PREEMPTIONS = "pennyweight.preemptions"
    PEAK_BATCH = "pennyweight.peak_batch"
    PRICE = "pennyweight.price"
    COST = "pennyweight.cost"


class SpanName(StrEnum):
    """Names of spans that are not named "{operation} {model}"."""

    QUEUE = "queue"  # enqueued until first scheduled
    PREFILL = "prefill"  # first scheduled until first token
    DECODE = "decode"  # first token until the end


class Operation(StrEnum):
    """Values of Attribute.OPERATION."""

    CHAT = "chat"
    TEXT_COMPLETION = "text_completion"
    EMBEDDINGS = "embeddings"


def operation_of(endpoint: str) -> Operation:
    if "chat" in endpoint:
        return Operation.CHAT
    return Operation.EMBEDDINGS if "embeddings" in endpoint else Operation.TEXT_COMPLETION


class Metric(StrEnum):
    """Names of metrics. Labels of the engine's are MODEL_LABEL and ENGINE_LABEL, and the one named here."""

    # As vLLM's
    RUNNING = "vllm:num_requests_running"
    WAITING = "vllm:num_requests_waiting"
    KV_USAGE = "vllm:kv_cache_usage_perc"  # 1 is full
    PREEMPTIONS = "vllm:num_preemptions"
    PROMPT_TOKENS = "vllm:prompt_tokens"
    RECOMPUTED_TOKENS = "vllm:prompt_tokens_recomputed"
    PREFIX_QUERIES = "vllm:prefix_cache_queries"  # in tokens
    PREFIX_HITS = "vllm:prefix_cache_hits"  # in tokens
    GENERATION_TOKENS = "vllm:generation_tokens"
    STEP_TOKENS = "vllm:iteration_tokens_total"  # a histogram, whatever it is called
    SUCCESS = "vllm:request_success"  # finished_reason
    TTFT = "vllm:time_to_first_token_seconds"
    ITL = "vllm:inter_token_latency_seconds"
    TPOT = "vllm:request_time_per_output_token_seconds"
    E2E = "vllm:e2e_request_latency_seconds"
    QUEUE = "vllm:request_queue_time_seconds"
    PREFILL = "vllm:request_prefill_time_seconds"
    DECODE = "vllm:request_decode_time_seconds"
    INFERENCE = "vllm:request_inference_time_seconds"
    REQUEST_PROMPT_TOKENS = "vllm:request_prompt_tokens"
    REQUEST_GENERATION_TOKENS = "vllm:request_generation_tokens"
    REQUEST_MAX_TOKENS = "vllm:request_params_max_tokens"
    # Ours
    STEPS = "pennyweight_engine_steps"
    MIXED_TENANT_STEPS = "pennyweight_engine_mixed_tenant_steps"
    FAILED_STEPS = "pennyweight_engine_failed_steps"
    STEP_SECONDS = "pennyweight_engine_step_seconds"
    DEVICE_SECONDS = "pennyweight_engine_device_seconds"  # category
    WASTED_SECONDS = "pennyweight_engine_wasted_device_seconds"  # cause
    KV_BLOCK_SECONDS = "pennyweight_engine_kv_block_seconds"
    ATTEMPTS = "pennyweight_engine_attempts"  # outcome, error
    STALLED_STEPS = "pennyweight_engine_stalled_steps"
    STALL_SECONDS = "pennyweight_engine_stall_seconds"
    STEP_MODEL_R2 = "pennyweight_engine_step_model_r2"
    STEP_MODEL_ERROR = "pennyweight_engine_step_model_error"
    STEP_MODEL_PACE = "pennyweight_engine_step_model_pace"


MODEL_LABEL: Final = "model_name"
ENGINE_LABEL: Final = "engine"  # stable name of the worker
