"""The command `mccl-fleet`."""
