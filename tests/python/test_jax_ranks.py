"""Attention over the devices of a JAX mesh, within shard_map and of sharded arrays, against one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("tandem.jax", reason="this package was built without JAX")


def test_devices_of_a_mesh() -> None:
    script = Path(__file__).with_name("jax_ranks.py")
    given = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    run = subprocess.run(
        [sys.executable, str(script)], env=given, capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0 and run.stdout.endswith("passed\n"), run.stdout + run.stderr
