"""Lightning on a fleet: the strategy `mccl_ddp`, and running an unmodified script inside a fleet worker.

`import torch` loads this layer by itself; where `TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns that off, importing
this package does the same. It installs an import hook for Lightning and has no other effect.
"""

from mccl_lightning._autoload import autoload

autoload()
