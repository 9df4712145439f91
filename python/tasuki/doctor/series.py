"""How Tasuki, vLLM and SGLang call what the checks look at.

Our names: `running`, `waiting` (requests), `kv_used` (share of the pool that requests hold),
`requests` (ended), `errors`, `preemptions`, `prompt_tokens`, `prompt_computed`,
`prompt_cached` (found in the worker's own cache), `prompt_loaded` (KV from elsewhere),
`output_tokens`, `kv_bytes`, `kv_transfers`, `kv_descriptors`, `kv_seconds`, `kv_failed`,
`kv_expired`, `kv_late` (read after it expired), `max_tokens_one` (requests for a single
token), `ttft_sum`/`ttft_count`, `itl_sum`/`itl_count` (seconds).

Source: vLLM 0.32, `v1/metrics/loggers.py` and the NIXL connector's metrics (older names
second). SGLang: its documentation of production metrics, its source,
`srt/observability/metrics_collector.py`, and servers of 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasuki.doctor.samples import Series

Table = Mapping[str, Sequence[Series]]


def _one(name: str, how: str = "sum", **labels: str) -> list[Series]:
    return [Series(name, labels, how)]


def _histogram(name: str, *metrics: str) -> dict[str, list[Series]]:
    return {
        f"{name}_{part}": [Series(f"{metric}_{part}") for metric in metrics]
        for part in ("sum", "count")
    }


_SOURCE = "vllm:prompt_tokens_by_source_total"

VLLM: Table = {
    "running": _one("vllm:num_requests_running"),
    "waiting": _one("vllm:num_requests_waiting"),
    "waiting_capacity": _one("vllm:num_requests_waiting_by_reason", reason="capacity"),
    "kv_used": [
        Series("vllm:kv_cache_usage_perc", how="mean"),
        Series("vllm:gpu_cache_usage_perc", how="mean"),
    ],
    "requests": _one("vllm:request_success_total"),
    "errors": _one("vllm:request_success_total", finished_reason="error"),
    "http_errors": _one("http_requests_total", status="5*"),
    "preemptions": _one("vllm:num_preemptions_total"),
    "prompt_tokens": _one("vllm:prompt_tokens_total"),
    "prompt_computed": _one(_SOURCE, source="local_compute"),
    "prompt_cached": [
        Series(_SOURCE, {"source": "local_cache_hit"}),
        Series("vllm:prefix_cache_hits_total"),
    ],
    "prompt_loaded": [
        Series(_SOURCE, {"source": "external*"}),
        Series("vllm:external_prefix_cache_hits_total"),
    ],
    "output_tokens": _one("vllm:generation_tokens_total"),
    "kv_bytes": _one("vllm:nixl_bytes_transferred_sum"),
    "kv_transfers": _one("vllm:nixl_bytes_transferred_count"),
    "kv_descriptors": _one("vllm:nixl_num_descriptors_sum"),
    "kv_seconds": _one("vllm:nixl_xfer_time_seconds_sum"),
    "kv_failed": _one("vllm:nixl_num_failed_transfers_total"),
    "kv_expired": _one("vllm:nixl_num_kv_expired_reqs_total"),
    "kv_late": _one("vllm:nixl_num_notifications_after_expiry_total"),
    **_histogram("max_tokens", "vllm:request_params_max_tokens"),
    "max_tokens_one": _one("vllm:request_params_max_tokens_bucket", le="1.0"),
    **_histogram("ttft", "vllm:time_to_first_token_seconds"),
    **_histogram("itl", "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    **_histogram("queue", "vllm:request_queue_time_seconds"),
}

SGLANG: Table = {
    "running": _one("sglang:num_running_reqs", "mean"),
    "waiting": _one("sglang:num_queue_reqs", "mean"),
    "prefill_queue": [
        Series("sglang:num_prefill_prealloc_queue_reqs", how="mean"),
        Series("sglang:num_prefill_bootstrap_queue_reqs", how="mean"),
    ],
    "decode_queue": _one("sglang:num_decode_prealloc_queue_reqs", "mean"),
    "kv_used": _one("sglang:token_usage", "mean"),
    "requests": _one("sglang:num_requests_total"),
    # Aborted requests are those of clients that hang up, too; 503 is a server that starts or ends.
    "http_errors": _one("sglang:http_responses_total", status_code="500"),
    "preemptions": _one("sglang:num_retracted_requests_total"),
    "prompt_tokens": _one("sglang:prompt_tokens_total"),
    "prompt_cached": _one("sglang:cached_tokens_total"),
    "output_tokens": _one("sglang:generation_tokens_total"),
    "kv_gb_per_s": _one("sglang:kv_transfer_speed_gb_s", "mean"),
    "kv_bytes": [Series("sglang:kv_transfer_total_mb_sum", scale=1e6)],
    "kv_transfers": _one("sglang:kv_transfer_total_mb_count"),
    "kv_seconds": [Series("sglang:kv_transfer_latency_ms_sum", scale=1e-3)],
    "kv_failed": _one("sglang:num_transfer_failed_reqs_total"),
    "kv_bootstrap_failed": _one("sglang:num_bootstrap_failed_reqs_total"),
    **_histogram("ttft", "sglang:time_to_first_token_seconds"),
    **_histogram(
        "itl", "sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"
    ),
    **_histogram("queue", "sglang:queue_time_seconds"),
}

# Counters that an SGLang server shows from the first one on; those of KV are of a split's servers.
SGLANG_FROM_FIRST = {"http_errors": 0.0, "preemptions": 0.0}
SGLANG_KV_FROM_FIRST = {"kv_failed": 0.0, "kv_bootstrap_failed": 0.0}

# Of one worker, from the metrics of a router: `worker` is added to the labels.
_TASUKI_WORKER = {
    "running": "running",
    "waiting": "waiting",
    "waiting_prompt_tokens": "waiting_prefill_tokens",
    "free_blocks": "free_blocks",
    "total_blocks": "total_blocks",
    "leased_blocks": "leased_blocks",
    "quarantined_blocks": "quarantined_blocks",
    "stuck_blocks": "stuck_blocks",
    "prefill_tokens_per_s": "prefill_tokens_per_second",
    "decode_step_s": "decode_step_seconds",
    "prompt_computed": "prompt_tokens_computed_total",
    "prompt_cached": "prompt_tokens_cached_total",
    "output_tokens": "output_tokens_total",
    "steps": "steps_total",
    "preemptions": "preemptions_total",
    "kv_bytes": "kv_pulled_bytes_total",
    "kv_blocks": "kv_pulled_blocks_total",
    "kv_transfers": "kv_pulls_total",
    "kv_failed": "kv_pull_failures_total",
    "kv_timeouts": "kv_pull_timeouts_total",
    "leases": "leases_granted_total",
    "kv_expired": "leases_expired_total",
    "digest_mismatches": "kv_digest_mismatches_total",
    "up": "up",
    "draining": "draining",
    "failing": "failing",
}


def tasuki_worker(number: str) -> Table:
    """Series of the worker that a router calls by this number."""
    return {
        ours: [Series(f"tasuki_worker_{theirs}", {"worker": number})]
        for ours, theirs in _TASUKI_WORKER.items()
    }


def tasuki_pair(labels: Mapping[str, str]) -> Table:
    """Series of a pair of workers."""
    names = {
        "kv_bytes": "bytes",
        "kv_transfers": "pulls",
        "kv_descriptors": "descriptors",
        "kv_seconds": "wire_seconds",
        "reconnects": "reconnects",
    }
    return {
        ours: [Series(f"tasuki_kv_pair_{theirs}_total", labels)] for ours, theirs in names.items()
    }


TASUKI_ROUTER: Table = {
    "admission_waiting": _one("tasuki_admission_waiting_requests"),
    "in_flight": _one("tasuki_requests_in_flight"),
    "requests": _one("tasuki_requests_total"),
    "output_tokens": _one("tasuki_output_tokens_total"),
    "prompt_tokens": _one("tasuki_prompt_tokens_total"),
    **_histogram("ttft", "tasuki_time_to_first_token_seconds"),
    **_histogram("itl", "tasuki_inter_token_latency_seconds"),
}

# Counters of a router that have a reason, and the label that is it.
TASUKI_REASONS = {
    "tasuki_requests_total": "outcome",
    "tasuki_failures_total": "kind",
    "tasuki_http_errors_total": "code",
    "tasuki_recomputed_prompts_total": "reason",
}
