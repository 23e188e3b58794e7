"""Changes one of Lightning's modules just after it was imported."""

import warnings
from types import ModuleType

from mccl_lightning import connector, environment, resume, strategy
from mccl_lightning.namespaces import BY_MODULE


def install(module: ModuleType) -> None:
    """Makes `mccl_ddp` and fleet mode known to a freshly imported module of Lightning.

    A release of Lightning that looks different inside is left as it is, with a warning.

    Raises:
        ImportError: the same inside a fleet worker, where a script that is not adapted would train alone.
    """
    name = module.__name__
    namespace = BY_MODULE[name]
    try:
        if name == namespace.strategies:
            strategy.register(module, namespace)
        elif name == namespace.connector:
            connector.wrap(module, namespace)
        else:
            resume.wrap(module)
    except (AttributeError, TypeError, ValueError) as error:
        text = f"this release of {namespace.root} cannot run on mccl: {name} has changed ({error})"
        if environment.fleet() is not None:
            raise ImportError(text) from error
        warnings.warn(text, stacklevel=2)
