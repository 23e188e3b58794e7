"""Lightning on a fleet: the strategy `mccl_ddp`, and running an unmodified script inside a fleet worker."""
