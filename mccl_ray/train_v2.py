"""Ray Train's trainer, without what a fleet of fixed Macs has no use for.

Stock Ray Train starts five helper actors for a run; three of them (autoscaling requests, data sets,
clean-up of placement groups whose driver lives on) are processes that cost seconds at each start and do
nothing here. This module and `supervisor` are the only ones that touch Ray Train's internals, which a Ray
release may change.
"""

from __future__ import annotations

from typing import Any

from ray.train.v2._internal.callbacks import AcceleratorSetupCallback, DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.scaling_policy import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
)
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.result import Result

_UNUSED = (AcceleratorSetupCallback, DatasetsCallback, PlacementGroupCleanerCallback)


class FleetScalingPolicy(ScalingPolicy):  # type: ignore[misc,unused-ignore]
    """The job's number of workers, without asking an autoscaler: Macs come and go as their agents decide."""

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        return ResizeDecision(
            num_workers=self.scaling_config.num_workers,
            resources_per_worker=self.scaling_config.resources_per_worker,
        )

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        return NoopDecision()

    def _get_num_workers_for_resource_request(self) -> int:
        return int(self.scaling_config.num_workers)

    def after_controller_start(self, train_run_context: Any) -> None:
        """No autoscaler to tell."""


class FleetTrainer(DataParallelTrainer):  # type: ignore[misc,unused-ignore]
    """Runs a loop on the Macs of a fleet; the process that calls `fit` must outlive the run."""

    def _create_default_callbacks(self) -> list[Any]:
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, _UNUSED)]

    def _initialize_and_run_controller(self, **options: Any) -> Result:
        return super()._initialize_and_run_controller(
            **{**options, "scaling_policy": FleetScalingPolicy(self.scaling_config)}
        )
