"""The objectives inside other libraries' trainers: `stppo.plugins.verl`, `stppo.plugins.trl`.

Importing this package imports none of them. `stppo plugins check HOST` tells whether a host would find its
plug-in."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from packaging.specifiers import SpecifierSet

from stppo.checks import install
from stppo.plugins import methods

SUPPORTED = {"verl": ">=0.9.1,<0.10", "trl": ">=1.16,<1.17"}
VERL_LOSSES = (*methods.PAPER, *methods.OFFERED["verl"])


class HostError(ImportError):
    """A host library that is missing or not supported, or a plug-in that it did not load; one line with the
    remedy."""


def require_host(host: str) -> str:
    """The installed version of `host`; raises HostError naming the extra or the supported versions."""
    try:
        installed = version(host)
    except PackageNotFoundError:
        raise HostError(f"{host} is not installed; {install(host)}") from None
    if not SpecifierSet(SUPPORTED[host]).contains(installed, prereleases=True):
        raise HostError(
            f"{host} {installed} is not supported, {host}{SUPPORTED[host]} is needed; {install(host)}"
        )
    return installed


def check(host: str) -> str:
    """One line about a plug-in that works in this process, found the way that its host finds it.

    verl loads plug-ins by entry point and swallows what goes wrong there, so the losses are looked for in its
    registry first, and only then is the plug-in imported directly to see its error. verl's default trainer
    must be there too. TRL loads nothing by itself. Raises HostError, or what the import raised as the cause
    of one."""
    if host not in SUPPORTED:
        raise ValueError(f"{host}: unknown host; allowed: {', '.join(SUPPORTED)}")
    installed = require_host(host)
    name = f"stppo.plugins.{host}"
    try:
        if host == "verl" and _registered():
            _require_trainer(installed)
            return f"verl {installed}: `import verl` registers {', '.join(VERL_LOSSES)}"
        importlib.import_module(name)
    except HostError:
        raise
    except Exception as error:  # whatever the host swallowed
        raise HostError(f"{host} {installed}: {name} fails with {type(error).__name__}: {error}") from error
    if host == "verl":
        raise HostError(
            f"verl {installed}: {name} works, but verl did not load it by entry point; reinstall stppo (pip "
            "install -e . for a checkout), unset VERL_USE_EXTERNAL_PLUGINS or let it name stppo, or set "
            f"actor_rollout_ref.model.external_lib={name}"
        )
    return f"{host} {installed}: {name} can be imported"


def _require_trainer(installed: str) -> None:
    """verl alone does not bring what its default trainer imports."""
    try:
        importlib.import_module("verl.trainer.ppo.v1")
    except ImportError as error:
        raise HostError(
            f"verl {installed}: the losses are registered, but verl's default trainer cannot be imported "
            f"({error}); pip install 'verl[verl-core]=={installed}'"
        ) from error


def _registered() -> bool:
    """Whether `import verl` by itself has registered every loss."""
    core: ModuleType = importlib.import_module("verl.trainer.ppo.core_algos")
    return set(VERL_LOSSES) <= set(core.POLICY_LOSS_REGISTRY)
