"""The functions of the package. See `attention` for what all of them take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

from tandem import _arrays, _call, _core, _dropout
from tandem.functions import _functions

if TYPE_CHECKING:
    import numpy as np
    import torch
    from typing_extensions import Unpack

    Array = TypeVar("Array", np.ndarray[Any, Any], torch.Tensor)

    class Options(TypedDict, total=False):
        """The options of a call, as the rows of `_call.Call`, but what it returns."""

        scale: float | None
        causal: bool
        window: tuple[int, int]
        softcap: float
        deterministic: bool
        check: bool
        precision: str
        strict: bool
        backward_precision: str
        split_size: int
        threads: int
        sm_limit: int
        dropout_p: float
        dropout_seed: int | None
        dropout_offset: int

    class _Keywords(Options, total=False):
        """The keywords of `attention` but those that decide what it returns."""

        sink: Any
        cu_seqlens_q: Any
        cu_seqlens_k: Any
        seqused_q: Any
        seqused_k: Any
        q_scale: Any
        k_scale: Any
        v_scale: Any
        indices: Any
        topk_length: Any
        gate: Any
        page_table: Any
        leftpad_k: Any
        cache_batch_idx: Any
        causal_by_sequence: Any
        out: Any
        out_dtype: Any
        score_mod: Any
        mask_mod: Any
        bias: Any
        mask: Any
        alibi_slopes: Any


__version__ = _core.version()


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[False] = ...,
    return_max_logits: Literal[False] = ...,
    **options: Unpack[_Keywords],
) -> Array: ...


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = ...,
    **options: Unpack[_Keywords],
) -> tuple[Array, Array]: ...


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[True],
    **options: Unpack[_Keywords],
) -> tuple[Array, Array, Array]: ...


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: bool = ...,
    return_max_logits: bool = ...,
    **options: Unpack[_Keywords],
) -> Any: ...


# Defaults are integers: with dynamic=True torch.compile takes a float for a variable, and compiles once more.
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    sink: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    indices: Any = None,
    topk_length: Any = None,
    gate: Any = None,
    page_table: Any = None,
    leftpad_k: Any = None,
    cache_batch_idx: Any = None,
    causal_by_sequence: Any = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    out: Any = None,
    out_dtype: Any = None,
    deterministic: bool = False,
    check: bool = False,
    precision: str = "exact",
    strict: bool = False,
    backward_precision: str = "exact",
    split_size: int = 0,
    threads: int = 0,
    sm_limit: int = 0,
    score_mod: Any = None,
    mask_mod: Any = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    dropout_p: float = 0,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
) -> Any:
    """Exact attention: ``softmax(scale * q @ k.T + mask) @ v`` for every head, without storing the scores.

    Arrays are NumPy arrays (float32, float16, int8; bfloat16 and float8_e4m3fn with ml_dtypes) or PyTorch
    tensors, all of one library; CUDA tensors run on PyTorch's current stream. They are read where they lie,
    whatever their strides, as long as the last dimension is contiguous. The GIL is released while the
    library computes. With PyTorch, autograd flows through the result, the LSE, the sink and the gate; nothing
    is kept for a backward pass unless an input requires a gradient.

    Args:
      q: queries, ``(batch, seqlen_q, heads_q, head_dim_qk)``; with ``cu_seqlens_q`` ``(total_q, heads_q,
        head_dim_qk)``. head_dim_qk is up to 1024 on the CPU and 256 on a GPU; without gradients up to 576
        there, and head_dim_v up to 512. Kernels are fastest on multiples of 8; others are padded inside.
      k: keys, ``(batch, seqlen_k, heads_kv, head_dim_qk)``; with ``cu_seqlens_k`` ``(total_k, heads_kv,
        head_dim_qk)``. heads_kv divides heads_q: query head h reads key head ``h // (heads_q // heads_kv)``
        (GQA, MQA).
      v: values, the shape of k with head_dim_v in place of head_dim_qk.
      scale: multiplies ``q @ k.T``. Default ``head_dim_qk ** -0.5``. A number: a tensor that requires a
        gradient is an error.
      causal: query i sees keys up to ``i + seqlen_k - seqlen_q`` (aligned to the bottom right corner).
      window: ``(left, right)``, inclusive on both sides around that same diagonal; -1 is unbounded.
        ``causal`` clips right to 0.
      softcap: scores become ``softcap * tanh(scores / softcap)`` before masking. 0: off; at most 1e30.
      sink: ``(heads_q,)`` float32, a learnable logit per head that joins the softmax's denominator and has no
        value. The LSE includes it, and is the sink where a query sees no key.
      cu_seqlens_q: ``(batch + 1,)`` int32 or int64, ascending from 0: sequence b is rows ``cu[b]:cu[b + 1]``
        of q. Rows past ``cu[-1]`` give 0.
      cu_seqlens_k: likewise for k and v.
      seqused_q: ``(batch,)`` int32 or int64: only so many first rows of each sequence take part; the rest
        give 0.
      seqused_k: likewise for k and v.
      q_scale: for float8_e4m3fn and int8: ``(1,)`` or ``(batch, heads_kv)`` float32; the value is code *
        scale. Default 1. With precision "fp8" or "int8", and for k and v beside another q, also what
        ``quantize`` returns: ``(batch, heads_q)``,
        by block ``(batch, heads_q, ceil(seqlen_q / 128))`` or by row ``(batch, heads_q, seqlen_q)``; of
        packed tensors ``(heads_q, total_q)``.
      k_scale: likewise for k. Of a cache also by row, as ``append_kv`` writes them: ``(pages, heads_kv,
        page_size)``, or ``(entries, heads_kv, rows)`` of k. Those of rows past a sequence's end may be
        anything.
      v_scale: likewise for v.
      indices: ``(batch, seqlen_q, topk)`` int32 or int64, or ``(batch, seqlen_q, heads_kv, topk)``; packed
        without batch. A query sees the keys of its sequence with these numbers, from 0, each as often
        as it is named. -1, and whatever no key has, names none. ``causal`` and ``window`` hide some of them
        as ever. On the CPU, in precision "exact", without split_size, functions and dropout.
      topk_length: ``(batch, seqlen_q)`` or ``(total_q,)``: so many first indices of a query count.
      gate: an output gate, of the result's shape and q's dtype: the result is multiplied by its sigmoid
        before it is rounded. Gradients flow to it. On a GPU not with precision "fp8" or "int8".
      page_table: ``(batch, max_pages)`` int32 or int64: k and v are a cache in pages, ``(pages, page_size,
        heads_kv, head_dim)``, and row t of sequence b is row ``t % page_size`` of page ``page_table[b, t //
        page_size]``. ``seqused_k`` has the sequences' lengths. Entries past a sequence's end may hold
        anything; pages may be shared and in any order. A cache (page_table, leftpad_k, cache_batch_idx) goes
        without cu_seqlens_k, and with no input that requires a gradient.
      leftpad_k: ``(batch,)`` int32 or int64: so many first rows of each sequence of k and v are padding, and
        rows ``leftpad_k[b]`` to ``seqused_k[b]`` take part.
      cache_batch_idx: ``(batch,)`` int32 or int64: entry ``cache_batch_idx[b]`` of k and v, whose batch may
        then be another than q's, is sequence b's. Not with page_table.
      causal_by_sequence: ``(batch,)`` booleans, int32 or int64: sequence b is causal where it is not 0, and
        has ``window`` alone where it is. In place of ``causal``, for batches of requests of both kinds. With
        no input that requires a gradient.
      return_lse: also return the log-sum-exp of the scores.
      return_max_logits: also return, behind the LSE, the largest score of each query: after scale, softcap
        and functions, without the sink; of its shape. No gradient flows through it. Of GPUs Hopper has it,
        but not with precision "fp8", functions, dropout or heads of more than 256 dimensions; in 16 bits
        other last bits of the result and the LSE may come with it there.
      out: where to write the result, in q's dtype or in float32; made if None. Not with inputs
        that require gradients, and none that requires one itself. In memory of its own: no element of it
        shares memory with an input's, but it may be a slice beside them.
      out_dtype: "f32", "f16" or "bf16" (or the library's dtype) of a float8 or int8 call's result. Default
        bf16. For other inputs the result has q's dtype.
      deterministic: gradients are bitwise reproducible. The result always is.
      check: also check what cu_seqlens, seqused, page_table, leftpad_k and cache_batch_idx contain.
      precision: "exact", or compute in 8 bits from float16 or bfloat16 inputs: "fp8" or "int8" (about a third
        of fp8's error, but twice it with an attention sink: take strict). Gradients are then those of the
        16-bit formula at this result and LSE, unless backward_precision says otherwise. "fp8" also takes
        float8_e4m3fn inputs, "int8" int8 inputs, with their scales: then nothing but the probabilities is
        rounded. "exact" takes k and v in float8_e4m3fn or int8 beside a q that is not, as an 8-bit cache has
        them: they go to q's dtype on the way (in memory of their size in it), and products are in that. It
        takes q, k and v in float8_e4m3fn (on a GPU with a cache, or up to 64 queries a sequence): values are
        widened, and nothing else is rounded.
      strict: with 8 bits, no scale and no mean looks at later rows, so that causal results are bitwise those
        of the sequence cut off behind them.
      backward_precision: "exact", or "int8" with precision "int8": gradients by products in 8 bits, too,
        without softcap, sink; on Hopper not strict, heads of 64 or 128 (docs/results/gradients-in-8-bits.md).
      split_size: a multiple of 128, such as 1024: keys are cut at its multiples, and a sequence's bits then
        depend on nothing but the sequence: not on the batch, its place there, padding or pages, nor on
        whether its queries come in one call, in chunks or one by one. 0: off. With precision "exact";
        gradients are the same with it.
      threads: number of threads; 0 takes OMP_NUM_THREADS, or every core this process may use.
      sm_limit: on a GPU, the SMs that the persistent grids of a forward or backward kernel take at most, at
        least 1, so that kernels of others (NCCL's) run beside them; 0 is all. The forward kernels sm80 are
        not persistent: with them it is an error. On the CPU it changes nothing.
      score_mod: a function ``score_mod(score, b, h, q_idx, kv_idx)`` from the scaled score, after
        softcap, to the logit, as FlexAttention has it. It is called once, with proxies: see
        docs/functions.md. Where it gives -inf a pair is masked.
      mask_mod: a function ``mask_mod(b, h, q_idx, kv_idx)`` that is true where a key is visible,
        besides causal and window.
      bias: numbers added to scores (after score_mod); any shape that broadcasts to ``(batch,
        heads_q, seqlen_q, seqlen_k)``.
      mask: booleans of such a shape: True where a key is visible.
      alibi_slopes: ``(heads_q,)`` or ``(batch, heads_q)``: ``slope * abs(i + seqlen_k - seqlen_q
        - j)`` is taken off the score of query i and key j (ALiBi, arXiv:2108.12409). Gradients flow to
        these slopes, to bias, and to all that score_mod reads; on a GPU not with ``deterministic``.
      dropout_p: each entry of the softmax becomes 0 with this probability, below 1, and the others are
        divided by ``1 - dropout_p``. The same entries on the CPU and on a GPU.
      dropout_seed: an integer; with the same one the same entries are kept. None takes one of PyTorch's
        random numbers, which ``torch.manual_seed`` starts, or of NumPy's; replays of a CUDA graph draw anew.
      dropout_offset: an integer that makes another choice of the same seed.

    Returns:
      The result, of q's shape with head_dim_v; with ``return_lse`` a pair of it and the LSE: natural
      logarithm, float32, ``(batch, heads_q, seqlen_q)``, or ``(heads_q, total_q)`` for packed queries. A
      query that sees no key gives 0 and -inf (with a sink: 0 and the sink).

    Raises:
      TandemError: before anything is written. InvalidArgumentError (also a ValueError) where an argument
        breaks a rule, UnsupportedError (also a NotImplementedError) where nothing here can do what is asked.
      TypeError: an argument is not an array, or the arrays are of different libraries.

    Method: FlashAttention (arXiv:2205.14135), FlashAttention-2 (arXiv:2307.08691) and FlashAttention-3
    (arXiv:2407.08608).
    """
    return_lse = _call.flag("return_lse", return_lse)
    first = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_scale, k_scale, v_scale)
    last = (page_table, leftpad_k, cache_batch_idx, _call.integers(causal_by_sequence))
    metadata = (*first, indices, topk_length, gate, *last)
    call = _call.Call(
        scale,
        causal,
        window,
        softcap,
        deterministic,
        check,
        threads,
        metadata,
        precision,
        strict,
        backward_precision,
        split_size,
        sm_limit,
        return_max_logits,
    )
    of_torch = _of_torch(q)
    call.functions = _functions_of(of_torch, call, q, k, score_mod, bias, alibi_slopes, mask_mod, mask)
    _dropout.add(call, dropout_p, dropout_seed, dropout_offset)
    if of_torch is not None:
        return of_torch.attention(call, q, k, v, sink, return_lse=return_lse, out=out, out_dtype=out_dtype)
    _dropout.draw(call, q)
    call.return_max_logits = _call.flag("return_max_logits", return_max_logits)
    results = _call.forward(call, q, k, v, sink, return_lse=return_lse, out=out, out_dtype=out_dtype)
    return _call.returned(call, results, return_lse)


def _of_torch(q: Any) -> Any:
    """The module for calls of PyTorch's tensors; None where q is an array of another library."""
    if not _arrays.is_torch(q):
        return None
    from tandem.torch import _calls  # once a call: it takes 0.3 us

    return _calls


def _functions_of(of_torch: Any, call: _call.Call, q: Any, k: Any, *functions: Any) -> Any:
    """What a call has in place of its functions; None where it has none."""
    score_mod, bias, alibi_slopes, mask_mod, mask = functions
    if score_mod is None and bias is None and alibi_slopes is None and mask_mod is None and mask is None:
        return None
    of_call = _functions.of_call if of_torch is None else of_torch.functions_of_call
    return of_call(call, q, k, *functions)


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    max_logits: Any = None,
    sink: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    indices: Any = None,
    topk_length: Any = None,
    gate: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dsink: Any = None,
    dgate: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """Gradients of `attention`, for use without autograd (PyTorch users call ``.backward()`` on the result).

    The options must be those of the forward call, which describes them, but split_size, which is its alone.
    precision and strict matter with backward_precision, without which gradients are in 16 bits. The scores
    are computed again from q, k and the LSE, so memory never grows with seqlen squared.

    Args:
      dout: gradient of the result, of its shape and dtype; the last dimension contiguous.
      q, k, v: the forward call's inputs. float8 and int8 are errors: they have no gradients.
      out: the forward call's result.
      lse: the forward call's LSE.
      dlse: gradient of the LSE, float32, of its shape. Default: none flows through it.
      max_logits: the forward call's. With backward_precision "int8" it is needed, and otherwise an error.
      dq, dk, dv: where to write the gradients, in q's dtype or float32, of which dk and dv have the same;
        made, of the shape and dtype of q, k and v, if None.
      dsink, dgate: where to write those of the sink, ``(heads_q,)`` float32, and of the gate; made if None.

    Returns:
      ``(dq, dk, dv)``, and behind them dsink and dgate where a sink and a gate were given.

    Raises:
      As `attention`.
    """
    first = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *(None,) * 3, indices, topk_length, gate)
    metadata = (*first, *(None,) * (len(_call.METADATA) - len(first)))
    given: dict[str, Any] = {**options}
    taken = (*_call.PARTS, "precision", "strict", "backward_precision")
    call = _call.of_options("attention_backward", given, taken)
    call.metadata = metadata
    of_torch = _of_torch(q)
    call.functions = _functions_of(of_torch, call, q, k, score_mod, bias, alibi_slopes, mask_mod, mask)
    _dropout.expect_seed(call)
    arrays, written = (dout, dlse, q, k, v, sink, out, lse, max_logits), (dq, dk, dv, dsink, dgate)
    backward = _call.backward if of_torch is None else of_torch.attention_backward
    *gradients, of_sink, of_gate = backward(call, arrays, written)
    wanted = ((of_sink, sink), (of_gate, gate))
    return (*gradients, *(gradient for gradient, given in wanted if given is not None))
