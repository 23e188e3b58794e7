"""Whether a fleet is large enough for a job; needs no Ray, so that bad input is refused at once."""

from __future__ import annotations

from collections.abc import Sequence


class NotEnoughMacs(RuntimeError):
    """The fleet has fewer Macs than the job has workers; the text says how many and what to do."""


def require(pool: str, workers: int, names: Sequence[str], *, remedy: str) -> None:
    """Returns if the Macs `names` suffice.

    Raises:
        NotEnoughMacs: there are fewer than `workers`.
    """
    count = len(names)
    if count >= workers:
        return
    known = f" ({', '.join(names)})" if names else ""
    fewer = f"set workers to at most {count} or " if count else ""
    raise NotEnoughMacs(
        f"the job asks for {workers} worker{'' if workers == 1 else 's'}, but the pool {pool!r} has "
        f"{count} Mac{'' if count == 1 else 's'}{known}; {fewer}{remedy}"
    )
