"""Exit statuses of `mccl-fleet` and of the driver."""

OK = 0
"""The command did what it was asked; for `submit --follow`: training finished."""
FAILED = 1
"""Training failed, or was cancelled."""
BAD_INPUT = 2
"""The command line, the job file, or a setting is wrong; nothing was started."""
NO_HEAD = 3
"""No head could be reached, or it does not know the job."""
NOT_ENOUGH_MACS = 4
"""The job asks for more workers than the fleet has Macs."""
INTERRUPTED = 130
"""Ctrl-C."""
TERMINATED = 143
"""SIGTERM."""
