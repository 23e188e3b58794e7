"""All-reduce on loopback: mccl against Gloo, in the same processes, in turns.

    python benchmarks/allreduce.py --world 2 4 --markdown

How it measures stands in measure.py.
"""

from __future__ import annotations

import json
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import KIB, MIB, Plan, Row, describe, import_mccl, measure_rank
from options import make_parser, tell, whole

SIZES = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]


def run_rank(rank: int, world: int, port: int, plan: Plan, output: str) -> None:
    """One rank of one world: all sizes, both backends in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    rows = measure_rank(plan)
    if rank == 0:
        Path(output).write_text(json.dumps(rows))
    dist.destroy_process_group()


def run_world(world: int, plan: Plan) -> list[Row]:
    """Starts `world` ranks on loopback; returns one row a size."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        mp.start_processes(run_rank, args=(world, port, plan, file.name), nprocs=world, start_method="fork")
        rows: list[Row] = json.loads(Path(file.name).read_text())
        return rows


def main() -> None:
    """Parses, runs, prints."""
    parser = make_parser(__doc__, SIZES)
    parser.add_argument("--world", type=whole(2, 256, " ranks"), nargs="+", default=[2, 4], help="numbers of ranks")
    arguments = parser.parse_args()
    try:
        import_mccl()
    except RuntimeError as error:
        parser.error(str(error))
    plan = Plan(tuple(arguments.sizes), arguments.seconds, arguments.in_flight)
    rows = [row for world in arguments.world for row in run_world(world, plan)]
    # What groups of one host choose by.
    result = describe("loopback, not shaped", arguments.commit) | {"link_profile": "loopback"}
    tell(arguments, result, rows, left_out={"mccl / iperf3", "Gloo / iperf3"})


if __name__ == "__main__":
    main()
