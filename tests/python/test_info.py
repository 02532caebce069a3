"""tandem.info: what this installation is and what it runs on."""

from __future__ import annotations

import json

import tandem


def test_info_names_the_backends() -> None:
    info = tandem.info()
    assert json.loads(json.dumps(info)) == info
    assert info["version"] == tandem.__version__ and set(info["backends"]) == {"cpu", "gpu"}
    cpu, gpu = info["backends"]["cpu"], info["backends"]["gpu"]
    assert cpu["target"] in cpu["targets"] and cpu["threads"] >= 1
    assert set(gpu) == {"driver", "devices", "compiler", "kernel_cache", "shipped_kernels"}
    assert gpu["driver"] and gpu["compiler"] and gpu["shipped_kernels"] >= 0  # there, or why not
    assert gpu["driver"].startswith("CUDA ") or not gpu["devices"]
    for device in gpu["devices"]:
        assert device["name"] and device["memory_gib"] > 1 and device["multiprocessors"] > 0
        assert device["supported"] == (device["kernels"] != "")
        assert (device["kernels"] == "sm90") == (device["capability"] == "9.0")


def test_the_peak_is_measured_on_request() -> None:
    assert "peak" not in tandem.info()
    assert tandem.info(measure_peak=True)["peak"]["f32_gflops"] > 1
