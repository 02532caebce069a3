"""A model that gives the attention's weights as an output, of layers that it does not tell: Pix2Struct."""

from __future__ import annotations

import functools
from typing import Any

from transformers.models.pix2struct.modeling_pix2struct import Pix2StructVisionEncoder

from tandem.integrations import _instead
from tandem.integrations._masks import Mask


def serve() -> None:
    """Has it refuse the weights where its mask is Tandem's."""
    own = getattr(Pix2StructVisionEncoder.forward, "_tandem_own", Pix2StructVisionEncoder.forward)

    @functools.wraps(own)
    def forward(self: Any, *given: Any, **options: Any) -> Any:
        if any(isinstance(argument, Mask) for argument in (*given, *options.values())):
            _instead.refuse_weights(bool(options.get("output_attentions")))
        return own(self, *given, **options)

    forward._tandem_own = own  # type: ignore[attr-defined]
    Pix2StructVisionEncoder.forward = forward
