"""Shared by all tests."""

from __future__ import annotations

import signal

import torch

# Ranks are forked from this process: a pool of OpenMP threads would not survive that.
torch.set_num_threads(1)

# Commands under test are interrupted: where this process was started in the background, they would inherit that SIGINT
# is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
