"""What every vendor's kernel needs here: its package, with the functions that we call, and a Hopper GPU."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class VendorCall(NamedTuple):
    """A call of a vendor's function, as we write it.

    Attributes:
        name: of the function.
        positional: how many arguments are given by position.
        keywords: those given by name.
    """

    name: str
    positional: int = 0
    keywords: tuple[str, ...] = ()


def why_not_hopper(package: str, calls: tuple[VendorCall, ...], device: torch.device) -> str | None:
    """Say why a package's functions cannot be called for memory of a device; None when they can.

    The package is imported only where its kernels could run.

    Args:
        package: its name.
        calls: all that we do with it.
        device: where the memory lies.
    """
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return f"it is called for Hopper GPUs here, and the memory lies on {device}"
    try:
        module = importlib.import_module(package)
    # Packages with compiled parts fail with errors of many types: a library that is not there, an assertion.
    except Exception as error:
        return f"the package {package} cannot be imported: {type(error).__name__}: {error}"
    return next((reason for call in calls if (reason := _why_not_call(module, call))), None)


def _why_not_call(module: Any, call: VendorCall) -> str | None:
    function = getattr(module, call.name, None)
    place = f"{module.__name__} {getattr(module, '__version__', 'of unknown version')}"
    if not callable(function):
        return f"{place} has no function {call.name}"
    try:
        _signature(function).bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        return f"{call.name} of {place} takes other arguments than ours: {error}"
    return None


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """What it takes; anything where a compiled function does not say."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return inspect.signature(lambda *_, **__: None)
