"""Calls of `tandem.jax` whose arrays are sharded over a mesh: a device computes its own entries and heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

_ROWS = ("b", None, "h", None)
#: Which dimensions of an array are batch entries and heads, by its name; a gradient's has a d before it.
_DIMENSIONS: dict[str, tuple[str | None, ...]] = {
    **dict.fromkeys(("q", "k", "v", "out"), _ROWS),
    **dict.fromkeys(("lse", "max_logits"), ("b", "h", None)),
    "sink": ("h",),
    **dict.fromkeys(("seqused_q", "seqused_k", "causal_by_sequence"), ("b",)),
    **dict.fromkeys(("q_scale", "k_scale", "v_scale"), ("b", "h", None)),
    "dropout_seed": (None,),
}


def _dimensions(name: str, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    known = _DIMENSIONS.get(name) or _DIMENSIONS.get(name.removeprefix("d"))
    if known is None:  # an array that broadcasts to (batch, heads, seqlen_q, seqlen_k)
        known = ("b", "h", None, None)[4 - len(shape) :]
    if name.endswith("_scale") and len(shape) == 1:
        known = (None,)
    return tuple(None if size == 1 else d for size, d in zip(shape, known, strict=False))


class Shards:
    """The call `run(shapes of results, arrays by name)`, divided as its arrays are."""

    def __init__(
        self, run: Callable[..., Any], arrays: dict[str, Any], results: dict[str, Any], dropout: bool
    ):
        self.run, self.inputs, self.results, self.dropout = run, tuple(arrays), results, dropout
        named = {**arrays, **results}
        self.shapes = {name: tuple(a.shape) for name, a in named.items()}
        self.batch, _, self.heads, _ = self.shapes["q"]
        self.heads_kv = self.shapes["k"][2]
        self.dimensions = {name: _dimensions(name, shape) for name, shape in self.shapes.items()}
        if self.heads_kv == 1:  # all query heads have the same keys
            self.dimensions = {
                n: tuple(d if d == "b" else None for d in ds) for n, ds in self.dimensions.items()
            }

    def __call__(self, *arrays: Any) -> Any:
        whole = custom_partitioning(
            lambda *given: self.run(self.results, dict(zip(self.inputs, given, strict=True)))
        )
        whole.def_partition(
            partition=self.partition,
            infer_sharding_from_operands=lambda mesh, given, _: self.of_results(mesh, self.axes(mesh, given)),
            sharding_rule=self.rule(),
            **({"r": self.heads // self.heads_kv} if self.heads > self.heads_kv > 1 else {}),
        )
        return jax.custom_batching.sequential_vmap(whole)(*arrays)

    def rule(self) -> str:
        """Shardy's: dimensions of one name are divided alike, others not at all."""

        def named(name: str, at: int, dimension: str | None) -> str:
            if dimension == "h":
                return "g" if self.shapes[name][at] == self.heads_kv else "(g r)"
            return dimension or f"{name.replace('_', '')}_{at}"

        def of(names: Any) -> str:
            return ", ".join(
                " ".join(named(n, at, d) for at, d in enumerate(self.dimensions[n])) for n in names
            )

        return f"{of(self.inputs)} -> {of(self.results)}"

    def axes(self, mesh: Any, given: Any) -> dict[str, Any]:
        """The mesh's axes that batch entries and heads are divided over: q's, where each has as many."""
        spec = getattr(given[self.inputs.index("q")].sharding, "spec", PartitionSpec())
        found = {"b": spec[0] if len(spec) > 0 else None, "h": spec[2] if len(spec) > 2 else None}
        sizes = {"b": self.batch, "h": self.heads_kv}
        return {d: axes for d, axes in found.items() if axes and sizes[d] % _size(mesh, axes) == 0}

    def of(self, mesh: Any, axes: dict[str, Any], name: str) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(d and axes.get(d) for d in self.dimensions[name])))

    def of_results(self, mesh: Any, axes: dict[str, Any]) -> tuple[NamedSharding, ...]:
        return tuple(self.of(mesh, axes, name) for name in self.results)

    def partition(self, mesh: Any, given: Any, _: Any) -> Any:
        axes = self.axes(mesh, given)
        shardings = self.of_results(mesh, axes)
        shapes = {
            name: jax.ShapeDtypeStruct(s.shard_shape(self.shapes[name]), self.results[name].dtype)
            for name, s in zip(self.results, shardings, strict=True)
        }

        def lowered(*local: Any) -> tuple[Any, ...]:
            arrays = dict(zip(self.inputs, local, strict=True))
            if self.dropout:
                q = arrays["q"]
                entry, head = (_index(mesh, axes.get(d)) * q.shape[i] for d, i in (("b", 0), ("h", 2)))
                arrays["dropout_places"] = places(q, self.heads, entry, head)
            found = zip(self.results, self.run(shapes, arrays), strict=True)
            return tuple(self.total(axes, name, array) for name, array in found)

        return mesh, lowered, shardings, tuple(self.of(mesh, axes, name) for name in self.inputs)

    def total(self, axes: dict[str, Any], name: str, array: Any) -> Any:
        """A gradient of what several devices read is the sum of theirs."""
        over = [a for d, a in axes.items() if d not in self.dimensions[name]]
        whole = name in ("out", "lse", "max_logits") or not over
        return array if whole else jax.lax.psum(array, tuple(_flat(over)))


def places(q: Any, heads: int, entry: Any = 0, head: Any = 0, row: Any = 0) -> Any:
    """`dropout_places` of a q whose first batch entry, head and query are these of a whole with so many
    heads."""
    first = (entry + jnp.arange(q.shape[0])) * heads + head
    found = jnp.zeros((q.shape[0], 4), jnp.int32).at[:, 1].set(row).at[:, 3].set(1)
    return found.at[:, 0].set(first.astype(jnp.int32))


def _flat(axes: Any) -> list[Any]:
    return [axis for a in axes for axis in (a if isinstance(a, tuple) else (a,))]


def _size(mesh: Any, axes: Any) -> int:
    size = 1
    for axis in _flat([axes]):
        size *= mesh.shape[axis]
    return size


def _index(mesh: Any, axes: Any) -> Any:
    """Which of the parts along these axes is this device's."""
    index = 0
    for axis in _flat([axes]) if axes else ():
        index = index * mesh.shape[axis] + jax.lax.axis_index(axis)
    return index
