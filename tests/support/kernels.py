"""Where our Triton kernels run in tests: compiled on a GPU, else interpreted on the CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="torch brings Triton on Linux x86-64 only")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
