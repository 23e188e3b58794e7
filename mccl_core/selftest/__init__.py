"""What a machine's owner runs to see, and to show, that the backend works there: `mccl-fleet doctor --self-test`.

Each check uses the public API on real processes. What needs a device that the machine does not have is listed as not
run, with the reason, so that a report never says more than what happened.
"""

from __future__ import annotations

from mccl_core.selftest.report import Check, Report, Status
from mccl_core.selftest.runner import plans, run

__all__ = ["Check", "Report", "Status", "plans", "run"]
