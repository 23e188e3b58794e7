"""Samples a second, with time injected."""

from mccl_lightning.throughput import Throughput


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_pauses_do_not_count() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    throughput.run()
    clock.now_s += 2
    throughput.add(10)
    throughput.pause()
    clock.now_s += 50
    throughput.run()
    clock.now_s += 3
    throughput.add(15)
    assert (throughput.elapsed_s(), throughput.samples, throughput.rate()) == (5, 25, 5)


def test_a_mark_starts_the_next_rate() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    throughput.run()
    for samples, seconds in ((10, 1), (40, 2)):
        clock.now_s += seconds
        throughput.add(samples)
        assert throughput.since_mark_s() == seconds
        assert throughput.mark() == samples / seconds


def test_unknown_batches_make_unknown_rates() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    throughput.run()
    clock.now_s += 1
    throughput.add(None)
    throughput.add(3)
    assert (throughput.samples, throughput.rate(), throughput.mark()) == (None, None, None)


def test_no_time_no_rate() -> None:
    throughput = Throughput(Clock())
    throughput.run()
    throughput.add(1)
    assert throughput.rate() is None
