"""A mark for tests of fp8 caches."""

from __future__ import annotations

import pytest
import torch

from tasuki.device_limits import limits_of

_LACKING = torch.cuda.is_available() and not limits_of(torch.device("cuda", 0)).has_fp8

needs_fp8 = pytest.mark.skipif(_LACKING, reason="fp8 needs compute capability 8.9")
