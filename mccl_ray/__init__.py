"""Ray for the fleet: a job's description, its placement on Macs, its life, and the Train backend `mccl`.

`mccl-fleet submit` is the way in. From Python there are `MCCLConfig`, for a Ray Train loop of one's own, and `JobSpec`,
which says what a job file may hold.
"""
