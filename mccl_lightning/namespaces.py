"""Where to hook into Lightning's two copies, `lightning`, and `pytorch_lightning` with `lightning_fabric`.

The standard library is enough here: this is read at the end of `import torch`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Namespace:
    """One importable copy of the Trainer or of Fabric."""

    root: str
    """The package that holds `strategies`."""
    fabric: str
    """The Fabric package that it is built on."""
    connector: str
    """The module whose connector turns the user's arguments into a strategy."""
    connector_class: str
    registry: str
    """The strategy registry's name in `strategies`."""
    trainer: str | None
    """The module that defines Trainer, None for Fabric."""

    @property
    def strategies(self) -> str:
        return f"{self.root}.strategies"

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules to hook, each when it is imported."""
        return tuple(name for name in (self.strategies, self.connector, self.trainer) if name)


def _trainer(root: str, fabric: str) -> Namespace:
    return Namespace(
        root=root,
        fabric=fabric,
        connector=f"{root}.trainer.connectors.accelerator_connector",
        connector_class="_AcceleratorConnector",
        registry="StrategyRegistry",
        trainer=f"{root}.trainer.trainer",
    )


def _fabric(root: str) -> Namespace:
    return Namespace(
        root=root,
        fabric=root,
        connector=f"{root}.connector",
        connector_class="_Connector",
        registry="STRATEGY_REGISTRY",
        trainer=None,
    )


NAMESPACES = (
    _trainer("lightning.pytorch", "lightning.fabric"),
    _trainer("pytorch_lightning", "lightning_fabric"),
    _fabric("lightning.fabric"),
    _fabric("lightning_fabric"),
)
BY_MODULE = {module: namespace for namespace in NAMESPACES for module in namespace.modules}
