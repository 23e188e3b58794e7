"""`mccl-fleet plan`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from mccl_core import explain, links
from mccl_core.config import CoreConfig
from mccl_core.links import LinkProfile
from mccl_core.planning import Candidate, Collective, Explanation, number_groups, share_switches
from mccl_core.settings import SettingsError
from mccl_core.simulation import Backward, StepPrediction, simulate_step
from mccl_fleet.options import Json, one_message
from mccl_fleet.sizes import nbytes_name, parse_nbytes
from mccl_fleet.tables import print_table
from mccl_ray import environ

_SIZES = ("4KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB")


def plan(
    workers: Annotated[int, typer.Option(min=1, max=10_000, help="Macs of the job.")],
    size: Annotated[
        list[str] | None,
        typer.Option(help="Bytes of a tensor (all_reduce) or of a rank's block, as in 64KiB; may be given again."),
    ] = None,
    bucket_mb: Annotated[float, typer.Option(min=0.001, max=10_000, help="DDP's bucket, in MB of 10^6 bytes.")] = 25,
    collective: Annotated[Collective, typer.Option(help="Which collective.")] = "all_reduce",
    link_profile: Annotated[
        str | None,
        typer.Option(
            help="A file from `mccl-fleet tune`, ethernet-10g or loopback. Default: MCCL_LINK_PROFILE, "
            "then ethernet-10g."
        ),
    ] = None,
    switch_size: Annotated[
        int | None, typer.Option(min=1, help="Ports of a switch: as few switches as hold all Macs, filled evenly.")
    ] = None,
    switch_groups: Annotated[
        str | None, typer.Option(help="The switch of each Mac by its rank, separated by commas, as in a,a,b,b.")
    ] = None,
    backward_ms: Annotated[
        float | None, typer.Option(min=0.001, max=1e8, help="Simulate a step whose backward takes this long.")
    ] = None,
    buckets: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Buckets of that step, filled evenly over backward.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Says which algorithm each size uses and what the others would cost, by the link profile; moves no bytes."""
    bucket_nbytes = round(bucket_mb * 1e6)
    with one_message():
        if (backward_ms is None) != (buckets is None):
            raise ValueError("--backward-ms and --buckets describe a step together; give both")
        if backward_ms is not None and collective != "all_reduce":
            raise ValueError(f"--backward-ms: a step is simulated for all_reduce only, not for {collective}")
        sizes = [parse_nbytes(text, option="--size") for text in size or _SIZES]
        config = CoreConfig.from_environment(environ.snapshot())
        profile = _profile(link_profile, config)
        switches = _switches(workers, switch_size, switch_groups)
        wanted = [*sizes, bucket_nbytes] if not size or backward_ms is not None else sizes
        explanations = [
            explain(collective, nbytes, workers, profile=profile, switch_groups=switches, config=config)
            for nbytes in dict.fromkeys(wanted)
        ]
        step = None
        if backward_ms is not None and buckets is not None and workers > 1:
            chosen = next(e.chosen for e in explanations if e.nbytes == bucket_nbytes)
            backward = Backward(backward_ms, buckets, bucket_nbytes)
            step = simulate_step(
                profile, chosen, workers, backward, group_of_rank=number_groups(switches), config=config
            )
    if as_json:
        for explanation in explanations:
            print(json.dumps(_as_values(explanation)))
        if step is not None:
            print(json.dumps({"step": asdict(step), "buckets": buckets, "bucket_nbytes": bucket_nbytes}))
        return
    _print(
        explanations,
        profile,
        step,
        f"{buckets} buckets of {nbytes_name(bucket_nbytes)} in {backward_ms:g} ms" if backward_ms is not None else "",
    )


def _profile(name: str | None, config: CoreConfig) -> LinkProfile:
    if name is None:
        return links.load(config.link_profile) if config.link_profile else links.ETHERNET_10G
    try:
        return links.load(name)
    except SettingsError as error:
        raise SettingsError(f"--link-profile {name}: {error}") from error


def _switches(workers: int, size: int | None, names: str | None) -> list[str]:
    """The switch of each rank; empty where all are behind one."""
    if size is not None and names is not None:
        raise ValueError("--switch-size and --switch-groups say the same; give one of them")
    if size is not None:
        return [str(switch) for switch in share_switches(workers, size)]
    if names is None:
        return []
    groups = [name.strip() for name in names.split(",")]
    if len(groups) != workers:
        raise ValueError(f"--switch-groups: {len(groups)} names for {workers} workers; give one for each")
    if "" in groups:
        raise ValueError(f"--switch-groups: the name of rank {groups.index('')} is empty")
    return groups


def _as_values(explanation: Explanation) -> dict[str, Any]:
    return {
        "collective": explanation.collective,
        "nbytes": explanation.nbytes,
        "workers": explanation.world,
        "link_profile": explanation.profile.model_dump(),
        "chosen": asdict(explanation.chosen),
        "candidates": [asdict(candidate) for candidate in explanation.candidates],
    }


def _print(explanations: list[Explanation], profile: LinkProfile, step: StepPrediction | None, of: str) -> None:
    first = explanations[0]
    print(
        f"{first.collective} on {first.world} workers, {profile.latency_us:g} µs, {profile.step_us:g} µs a step, "
        f"{profile.goodput_GBps:g} GB/s"
    )
    rows = []
    for explanation in explanations:
        others = [_name(other) for other in explanation.candidates if other != explanation.chosen]
        rows.append((nbytes_name(explanation.nbytes), _name(explanation.chosen), ", ".join(others) or "none"))
    print_table(("size", "uses (predicted)", "instead of"), rows)
    if step is not None:
        print(
            f"a step with {of}: {step.step_ms:,.1f} ms, of which {step.exposed_ms:,.1f} ms are communication that "
            f"backward does not hide; {step.goodput_share:.1%} of goodput (simulated)"
        )


def _name(candidate: Candidate) -> str:
    if candidate.predicted_ms == 0:
        return "nothing to send"
    chunks = f" × {candidate.chunks}" if candidate.chunks > 1 else ""
    channels = f" on {candidate.channels} channels" if candidate.channels > 1 else ""
    return f"{candidate.algorithm}{chunks}{channels} {candidate.predicted_ms:.3f} ms"
