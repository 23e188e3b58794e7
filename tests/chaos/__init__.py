"""A seeded campaign of random faults over hosts in namespaces: whatever happens, results are exact or errors are right.

    make chaos MINUTES=10            # or, with a seed and a report:
    PYTHONPATH=tests python -m chaos --minutes 10 --seed 7 --world 4 8 --report chaos.json

What there is: workload.py (what the ranks do), faults.py (what happens to them, and what must follow), campaign.py (one
fault after another, and what is checked after each), __main__.py (the command).

Each round's ranks are forked from this process, which holds torch and no engine: a fault costs a fork, not an import.
The seed gives the faults, their order and the ops; when exactly a fault strikes is up to the machine.
"""
