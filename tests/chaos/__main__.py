"""Runs a campaign; see the package's page. Ends with 0 where every promise was kept."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import torch
from netns.network import Network

from chaos.campaign import Broken, Campaign
from chaos.faults import FAULTS


def main() -> None:
    """Reads the command line, runs rounds until the time is over, prints one line a round and the report."""
    names = [fault.name for fault in FAULTS]
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long; the round under way is ended")
    parser.add_argument("--seed", type=int, default=1, help="gives the faults, their order and the ops")
    parser.add_argument("--world", type=int, nargs="+", default=[4, 8], help="ranks, in turns; 2 at least")
    parser.add_argument("--only", nargs="+", choices=names, metavar="FAULT", help=f"of {', '.join(names)}")
    parser.add_argument("--report", type=Path, metavar="FILE", help="where the summary goes, as JSON")
    arguments = parser.parse_args()
    if min(arguments.world) < 2:
        parser.error(f"--world: {min(arguments.world)} ranks are too few: a fault needs somebody who sees it")
    torch.set_num_threads(1)
    faults = [fault for fault in FAULTS if arguments.only is None or fault.name in arguments.only]
    until = time.monotonic() + 60 * arguments.minutes
    with Network(max(arguments.world)) as network:
        campaign = Campaign(network, arguments.seed, faults)
        for number, world in enumerate(itertools.cycle(arguments.world), start=1):
            if time.monotonic() >= until:
                break
            try:
                print(f"{number}: {campaign.next_round(world)}", flush=True)
            except Broken as error:
                print(f"{number}: BROKEN: {error}", flush=True)
    command = f"python -m chaos --seed {arguments.seed} --world {' '.join(map(str, arguments.world))}"
    summary = {"command": command, "minutes": arguments.minutes} | campaign.tally.summary()
    text = json.dumps(summary, indent=2)
    print(text)
    if arguments.report:
        arguments.report.write_text(text + "\n")
    sys.exit(1 if campaign.tally.broken else 0)


if __name__ == "__main__":
    main()
