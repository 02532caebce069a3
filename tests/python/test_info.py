"""tandem.info: what this installation is and what it runs on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tandem


def test_info_names_the_backends() -> None:
    info = tandem.info()
    assert json.loads(json.dumps(info)) == info
    assert info["version"] == tandem.__version__ and set(info["backends"]) == {"cpu", "gpu"}
    cpu, gpu = info["backends"]["cpu"], info["backends"]["gpu"]
    assert cpu["target"] in cpu["targets"] and cpu["threads"] >= 1
    kernels = {"kernel_cache", "kernel_cache_refusal", "shipped_kernels"}
    assert set(gpu) == {"driver", "devices", "compiler"} | kernels
    assert gpu["driver"] and gpu["compiler"] and gpu["shipped_kernels"] >= 0  # there, or why not
    assert gpu["driver"].startswith("CUDA ") or not gpu["devices"]
    for device in gpu["devices"]:
        assert device["name"] and device["memory_gib"] > 1 and device["multiprocessors"] > 0
        assert device["supported"] == (device["kernels"] != "")
        assert (device["kernels"] == "sm90") == (device["capability"] == "9.0")


def test_the_peak_is_measured_on_request() -> None:
    assert "peak" not in tandem.info()
    assert tandem.info(measure_peak=True)["peak"]["f32_gflops"] > 1


def test_info_says_why_a_cache_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    assert tandem.info()["backends"]["gpu"]["kernel_cache_refusal"] == ""
    tmp_path.chmod(0o777)
    gpu = tandem.info()["backends"]["gpu"]
    assert gpu["kernel_cache_refusal"] == "may be written by users other than its owner (mode 0777)"
