"""Times Dynamo's replay: `PYTHON dynamo_replay.py WORKERS REQUESTS RATE PREFILL ROUTER [TRACE]`.

A line of JSON, as `crates/sim/examples/speed.rs` says it and with the same words: requests of
512:128 tokens at RATE a second, before WORKERS engines of which PREFILL only prefill, or a trace in
Mooncake's format. ROUTER is round_robin or kv_router. Step times are Dynamo's own. PYTHON has
`ai-dynamo` and `ai-dynamo-runtime` (both --no-deps), pydantic, uvloop, msgspec and tqdm.
"""

import json
import os
import sys
import time

os.environ.setdefault("DYN_LOG", "error")

from dynamo.replay import run_synthetic_trace_replay, run_trace_replay

workers, requests, rate, prefill = map(int, sys.argv[1:5])
settings: dict[str, object] = {"router_mode": sys.argv[5], "num_workers": workers}
if prefill:
    settings = {
        "router_mode": sys.argv[5],
        "num_prefill_workers": prefill,
        "num_decode_workers": workers - prefill,
        "prefill_engine_args": {"engine": {"worker_type": "prefill"}},
        "decode_engine_args": {"engine": {"worker_type": "decode"}},
    }
began = time.process_time()
if len(sys.argv) > 6:
    report = run_trace_replay(sys.argv[6], **settings)
else:
    report = run_synthetic_trace_replay(512, 128, requests, request_rate=float(rate), **settings)
cpu_s = time.process_time() - began
summary = report.summary
assert summary["completed_requests"] == summary["num_requests"], summary
result = {
    "requests": summary["completed_requests"],
    "cpu_s": cpu_s,
    "requests_per_s": summary["completed_requests"] / cpu_s,
    "simulated_s": summary["duration_ms"] / 1e3,
}
print(json.dumps(result))
