#!/usr/bin/env python3
"""Writes the seed corpus of the file readers' fuzzers: valid files and files that break one rule."""

import io
import json
import struct
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent / "corpus"


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def npy(array, version=None, **replaced):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version)
    data = stream.getvalue()
    for old, new in replaced.get("swap", []):
        data = data.replace(old, new)
    return data


SAFETENSORS = {
    "two": safetensors({"q": entry("F16", [2, 3], 0, 12), "k": entry("I64", [1], 12, 20)}, bytes(range(20))),
    "metadata": safetensors({"__metadata__": {"a": "b"}, "x": entry("F32", [0, 4], 0, 0)}),
    "dtypes": safetensors(
        {n: entry(n, [4], 4 * i, 4 * i + 4) for i, n in enumerate(["F8_E4M3", "BOOL", "U8"])}, bytes(12)
    ),
    "scalar": safetensors({"x": entry("BF16", [], 0, 2)}, bytes(2)),
    "empty_object": safetensors({}),
    "duplicate": safetensors(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}'),
    "hole": safetensors({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, bytes(3)),
    "overlap": safetensors({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, bytes(3)),
    "overflow": safetensors({"a": entry("F32", [2**32, 2**32], 0, 0)}),
    "negative": safetensors({"a": entry("F32", [-1], 0, 4)}, bytes(4)),
    "float": safetensors({"a": entry("F32", [1.5e300], 0, 4)}, bytes(4)),
    "deep": safetensors(b'{"a":' + b"[" * 200),
    "huge_header": struct.pack("<Q", 2**63) + b"{}",
    "truncated": safetensors({"q": entry("F32", [4], 0, 16)}, bytes(7)),
}
ARRAY = np.arange(6, dtype="<f4").reshape(2, 3)
NPY = {
    "v1": npy(ARRAY, (1, 0)),
    "v2": npy(ARRAY.astype("<f2"), (2, 0)),
    "v3": npy(ARRAY.astype("<i8"), (3, 0)),
    "u2": npy(ARRAY.astype("<u2")),
    "u1": npy(ARRAY.astype("u1")),
    "vector": npy(np.arange(3, dtype="<i4")),
    "empty": npy(np.zeros((0, 4), "<f4")),
    "scalar": npy(np.float32(1)),
    "fortran": npy(np.asfortranarray(ARRAY)),
    "big_endian": npy(ARRAY.astype(">f4")),
    "records": npy(np.zeros(2, [("a", "<f4")])),
    "negative": npy(ARRAY, swap=[(b"(2, 3)", b"(2,-3)")]),
    "truncated": npy(ARRAY)[:-3],
    "header_only": npy(ARRAY)[:20],
}

for kind, files in (("safetensors", SAFETENSORS), ("npy", NPY)):
    folder = HERE / kind
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
