"""tandem.info: what this installation is and what it runs on."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tandem

ROOT = Path(__file__).resolve().parents[2]


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


def test_issue_templates_ask_for_info_by_commands_that_run() -> None:
    templates = list((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))
    assert len(templates) == 2
    for template in templates:
        text = template.read_text()
        (command,) = re.findall(r"^    python (-c .*)$", text, re.MULTILINE)
        assert re.match(r"---\nname: .*\nabout: .*\n---\n", text) and "`tandem info --json`" in text
        printed = subprocess.run([sys.executable, *shlex.split(command)], capture_output=True, check=True)
        assert set(json.loads(printed.stdout)) >= {"version", "backends"}


def test_the_peak_is_measured_on_request() -> None:
    assert "peak" not in tandem.info()
    assert tandem.info(measure_peak=True)["peak"]["f32_gflops"] > 1


def test_info_says_why_a_cache_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    assert tandem.info()["backends"]["gpu"]["kernel_cache_refusal"] == ""
    tmp_path.chmod(0o777)
    gpu = tandem.info()["backends"]["gpu"]
    assert gpu["kernel_cache_refusal"] == "may be written by users other than its owner (mode 0777)"
