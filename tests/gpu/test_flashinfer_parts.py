"""Private parts of FlashInfer that attention/flashinfer.py uses, in the installed version."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

WRAPPERS = ("BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper")


def missing(name: str) -> str:
    return f"FlashInfer {flashinfer.__version__} has no {name}"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_integer_workspaces_are_attributes(wrapper: str) -> None:
    made = getattr(flashinfer, wrapper)(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
    for name in ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer"):
        assert hasattr(made, name), missing(f"{wrapper}.{name}")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_plan_keeps_its_kernels_where_quick_call_looks(wrapper: str) -> None:
    source = inspect.getsource(getattr(flashinfer, wrapper).plan)
    assert "self._cached_module" in source, missing(f"{wrapper}._cached_module")


@pytest.mark.parametrize("argument", ["disable_split_kv", "seq_lens", "max_token_per_sequence"])
def test_plan_takes(argument: str) -> None:
    plan: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan
    assert argument in inspect.signature(plan).parameters, missing(f"plan's {argument}")


@pytest.mark.parametrize("name", ["_jit_module", "_paged_kv_indices_buf"])
def test_a_plan_keeps_its_parts_where_plans_for_graphs_look(name: str) -> None:
    source = inspect.getsource(flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan)
    assert f"self.{name}" in source, missing(f"{name} in plan")


def test_kernels_are_named_by_these_arguments_in_this_order() -> None:
    names = list(inspect.signature(flashinfer.jit.gen_batch_prefill_module).parameters)
    assert names[:5] == ["backend", "dtype_q", "dtype_kv", "dtype_o", "dtype_idx"], missing(
        f"gen_batch_prefill_module as before: {names}"
    )
    assert len(names) >= 11


def test_the_choice_of_kernels_is_a_function_of_the_device_and_dtypes() -> None:
    names = list(inspect.signature(flashinfer.utils.determine_attention_backend).parameters)
    assert len(names) == 6, missing(f"determine_attention_backend as before: {names}")
