"""Shared by all tests."""

from __future__ import annotations

import torch

# Ranks are forked from this process: a pool of OpenMP threads would not survive that.
torch.set_num_threads(1)
