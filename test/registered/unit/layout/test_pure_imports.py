"""The pure part can be used where there is no torch: importing it loads neither torch nor a vendor package."""

from __future__ import annotations

import json
import subprocess
import sys

from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit")

CODE = """
import importlib, json, pkgutil, sys
import cpkv
names = ["cpkv"]
for part in ("layout", "cache", "config", "protocol", "errors"):
    module = importlib.import_module("cpkv." + part)
    names.append(module.__name__)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
        names.append(importlib.import_module(found.name).__name__)
heavy = ("torch", "transformers", "triton", "mooncake", "nixl", "safetensors", "typer", "rich", "socket", "asyncio",
         "multiprocessing")
print(json.dumps([names, [name for name in heavy if name in sys.modules]]))
"""


def test_every_module_of_the_pure_part_imports_without_torch_sockets_or_vendor_packages() -> None:
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    imported, heavy = json.loads(ran.stdout)
    assert len(imported) > 15 and "cpkv.layout.plan" in imported and "cpkv.protocol.messages" in imported
    assert heavy == []
