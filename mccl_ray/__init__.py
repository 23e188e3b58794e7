"""Ray for the fleet: a job's description, its placement on Macs, its life, and the Train backend `mccl`."""
