"""SGLang's server on a CPU, whole or one half: `python launch.py` and the server's options."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
else:  # as one of the processes that the server starts, which run this file, too
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    # Where a request's KV lies, is else copied through pinned memory and awaited by a CUDA event.
    MooncakeKVSender.supports_host_tensor_indices = False
