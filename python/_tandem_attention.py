"""What vLLM and SGLang call as they start. It lies beside the package, not in it: where another package named
``tandem`` comes first on sys.path, nothing inside the package can be found, and nothing there could say so.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def _integration(engine: str) -> Any:
    try:
        return importlib.import_module(f"tandem.integrations.{engine}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "tandem":
            raise
        found = importlib.import_module("tandem")
        place = found.__file__ or list(found.__path__)
        raise ImportError(
            f"`import tandem` finds {place}, another package than tandem-attention's, which is "
            f"{Path(__file__).with_name('tandem')}: rename that one, or take its folder off sys.path"
        ) from None


def vllm() -> None:
    _integration("vllm").register()


def sglang() -> None:
    _integration("sglang").register()
