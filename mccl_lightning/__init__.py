"""Lightning on a fleet: the strategy `mccl_ddp`, and running an unmodified script inside a fleet worker.

`Trainer(strategy="mccl_ddp")`, also of Fabric, is Lightning's DDP with the device and the backend of the machine: mps
and mccl on a Mac, CUDA and NCCL where there is CUDA, else the CPU and mccl. `mccl_ddp_find_unused_parameters_true` does
what its name says. Either runs under torchrun, under Ray Train or alone; on the fleet a script that says `ddp` or
`auto` gets it, too.

`import torch` loads this layer by itself; where `TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns that off, importing
this package does the same. It installs an import hook for Lightning and has no other effect.
"""

from mccl_lightning._autoload import autoload

autoload()
