"""SGLang's server on a CPU, whole or one half: `python launch.py` and the server's options."""

from __future__ import annotations

import sys

from sglang.launch_server import run_server
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender
from sglang.srt.server_args import prepare_server_args

# Where a request's KV lies, is else copied through pinned memory and awaited by a CUDA event. Its
# processes run this file, too.
MooncakeKVSender.supports_host_tensor_indices = False

if __name__ == "__main__":
    run_server(prepare_server_args(sys.argv[1:]))
