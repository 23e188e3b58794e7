"""Writes a link profile, without a fleet: the same command on every machine, by torchrun.

    torchrun --nnodes 2 --nproc_per_node 1 --node_rank 0 --master_addr HOST -m mccl_core.tune --output FILE

MCCL_LINK_PROFILE=FILE then makes jobs choose by it; every rank needs the same file.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path

import torch.distributed as dist

import mccl_core
from mccl_core import tuning
from mccl_core.links import PRINTED_PREFIX


def main() -> None:
    """Measures, and on rank 0 writes the profile, or prints it on one line where no file is named."""
    parser = argparse.ArgumentParser(
        prog="mccl_core.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="where rank 0 writes the profile")
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time of one point; there are up to 18")
    parser.add_argument("--command", help="what the profile names as its command; by default this one")
    arguments = parser.parse_args()
    if not 0 < arguments.seconds <= 3600:
        parser.error(f"--seconds: {arguments.seconds:g} is not within 0 and 3600")
    if arguments.output and not arguments.output.absolute().parent.is_dir():
        parser.error(f"--output: there is no folder {arguments.output.absolute().parent}")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, or use `mccl-fleet tune`")
    mccl_core.require_backend()
    dist.init_process_group("mccl")
    try:
        measured = tuning.measure(
            seconds=arguments.seconds, report=lambda line: print(line, file=sys.stderr, flush=True)
        )
        if dist.get_rank() == 0:
            text = tuning.describe(
                measured,
                command=arguments.command or shlex.join(["python", "-m", "mccl_core.tune", *sys.argv[1:]]),
                when=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
                version=mccl_core.__version__,
            )
            if arguments.output:
                arguments.output.write_text(text)
            else:
                # One line: those of other ranks come in between.
                print(f"{PRINTED_PREFIX}{json.dumps(text)}", flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
