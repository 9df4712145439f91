"""Metrics of SGLang servers, made by hand: SGLang itself was not run.

Names, kinds and labels are those of its documentation of production metrics and of its source
(`srt/metrics/collector.py`); the numbers are invented.
"""

from __future__ import annotations

from collections.abc import Mapping

_LABELS = 'model_name="m",engine_type="unified",tp_rank="0",pp_rank="0"'

# What a decode server shows, beginning with a clean start.
START: dict[str, float] = {
    "num_running_reqs": 2.0,
    "num_queue_reqs": 0.0,
    "num_prefill_prealloc_queue_reqs": 0.0,
    "num_decode_prealloc_queue_reqs": 0.0,
    "token_usage": 0.2,
    "num_requests_total": 100.0,
    "num_aborted_requests_total": 0.0,
    "http_responses_total": 0.0,
    "num_retracted_requests_total": 0.0,
    "prompt_tokens_total": 100_000.0,
    "cached_tokens_total": 30_000.0,
    "generation_tokens_total": 20_000.0,
    "kv_transfer_speed_gb_s": 24.0,
    "kv_transfer_total_mb_sum": 13_000.0,
    "kv_transfer_total_mb_count": 100.0,
    "kv_transfer_latency_ms_sum": 540.0,
    "num_transfer_failed_reqs_total": 0.0,
    "num_bootstrap_failed_reqs_total": 0.0,
    "time_to_first_token_seconds_sum": 20.0,
    "time_to_first_token_seconds_count": 100.0,
    "inter_token_latency_seconds_sum": 300.0,
    "inter_token_latency_seconds_count": 20_000.0,
    "queue_time_seconds_sum": 3.0,
    "queue_time_seconds_count": 100.0,
}
# A quiet while later, in which clients hung up.
WELL = START | {
    "num_requests_total": 150.0,
    "num_aborted_requests_total": 6.0,
    "prompt_tokens_total": 150_000.0,
}
# Decode has no room, gives up transfers and drops requests.
ILL = WELL | {
    "num_queue_reqs": 3.0,
    "num_decode_prealloc_queue_reqs": 4.0,
    "token_usage": 0.97,
    "http_responses_total": 6.0,
    "num_retracted_requests_total": 40.0,
    "num_transfer_failed_reqs_total": 5.0,
}


def text(values: Mapping[str, float]) -> str:
    """As `/metrics` has them."""
    lines = []
    for name, value in values.items():
        bare = name.removesuffix("_sum").removesuffix("_count")
        kind = "counter" if name.endswith("_total") else "gauge"
        if bare == name:
            lines.append(f"# TYPE sglang:{name} {kind}")
        labels = 'status_code="500"' if name == "http_responses_total" else _LABELS
        lines.append(f"sglang:{name}{{{labels}}} {value}")
    return "\n".join(lines) + "\n"
