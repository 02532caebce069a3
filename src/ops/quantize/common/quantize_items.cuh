// The quantiser's work items, and how a CTA finds its next one.
#pragma once

#include "ops/quantize/config.hpp"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/scheduler.cuh"

namespace tandem::quantizer {

/// A work item: 128 rows of a head of one sequence, or, where sequences are short, of several heads.
struct WorkItem {
  int batch;  ///< the sequence
  int entry;  ///< the tensors' batch index: 0 if they are packed
  int head;
  int first;   ///< row of the sequence
  int begin;   ///< first row of the sequence in the tensor
  int used;    ///< rows in use
  int block;   ///< number of the block on the axis of quantized_layout.hpp
  int blocks;  ///< blocks that the sequence's rows in use have
};

struct Side {
  tile::VarlenSide rows;
  int blocks;          ///< blocks of 128 rows (equal lengths)
  int heads_per_item;  ///< heads of an item
};
TANDEM_DEVICE Side query_side(const QuantizeParams& p) {
  return {{p.cu_seqlens_q, p.seqused_q, p.rows_q, p.batch, p.heads_q, p.packed_q},
          p.blocks_q,
          p.heads_per_item_q};
}
TANDEM_DEVICE Side key_side(const QuantizeParams& p) {
  return {{p.cu_seqlens_k, p.seqused_k, p.rows_k, p.batch, p.heads_kv, p.packed_k},
          p.blocks_k,
          p.heads_per_item_k};
}

/// The last packed sequence whose first block is not past `block`.
TANDEM_DEVICE int sequence_of_block(const tile::VarlenSide& side, int block) {
  const int lane = static_cast<int>(ptx::thread_index_anew()) % warp_size;
  return tile::last_not_past(lane, side.batch, block, [&](int b) {
    return first_block(tile::sequence_rows(side.cu, {nullptr, 0, false}, side.rows, b).begin, b, true);
  });
}

/// Finds work item `number`; false if none of its rows is in use. `item.head` is its first head; the others
/// follow it in the tensor. All lanes of a warp call.
template <QuantizeConfig C>
TANDEM_DEVICE bool locate(const Side& side, int number, WorkItem& item) {
  const int of_block = C.varlen ? ceil_div(side.rows.heads, side.heads_per_item) : side.rows.heads;
  const int block = number / of_block;
  item.head = (number - block * of_block) * (C.varlen ? side.heads_per_item : 1);
  item.begin = 0;
  item.used = side.rows.rows;
  if (C.varlen && side.rows.packed) {
    item.batch = sequence_of_block(side.rows, block);
  } else {
    item.batch = block / side.blocks;
  }
  if constexpr (C.varlen) {
    const tile::SequenceRows rows =
        tile::sequence_rows(side.rows.cu, side.rows.used, side.rows.rows, item.batch);
    item.begin = rows.begin;
    item.used = rows.used;
  }
  const bool packed = C.varlen && side.rows.packed;
  item.entry = packed ? 0 : item.batch;
  item.block = packed ? block : block - item.batch * side.blocks;
  item.first = (item.block - first_block(item.begin, item.batch, packed)) * quant_block;
  item.blocks = ceil_div(item.used, quant_block);
  return item.first >= 0 && item.first < item.used;
}

TANDEM_DEVICE i64 offset_of(const Strides& s, const WorkItem& item, i64 row) {
  return item.entry * s.batch + row * s.row + item.head * s.head;
}
TANDEM_DEVICE i64 offset_of(const ScaleStrides& s, const WorkItem& item, i64 group) {
  return item.entry * s.batch + item.head * s.head + group * s.group;
}

/// Where sequences are short, the 128 rows of a work item are divided among its heads, into segments of 16,
/// 32 or 64 rows: the smallest that holds `rows`. Returns log2 of a segment's rows.
TANDEM_DEVICE int log2_segment(int rows) {
  return rows <= 16 ? 4 : rows <= 32 ? 5 : rows <= 64 ? 6 : 7;
}

enum class Which : int { q, k, v };

template <Which which>
TANDEM_DEVICE const QuantizedTensor& tensor(const QuantizeParams& p) {
  return which == Which::q ? p.q : which == Which::k ? p.k : p.v;
}

/// One of the tensors as a type.
template <Which w>
struct Tag {
  static constexpr Which which = w;
};

/// A pass over a work item, which a CTA does between two barriers: all heads of the item, or as many as there
/// are segments. One warp finds it a pass ahead and leaves it in shared memory. (When each warp found the
/// item for itself, twice, divisions and strides were a third of all instructions.)
struct alignas(16) Pass {
  const u16* source;  ///< the first row
  u8* quantized;      ///< where the first row goes; for V, its first channel and key
  float* scales;      ///< that of the group, or of the first row
  float* shift;       ///< that of the first row (Q)
  const float* mean;  ///< that of the head, or (varlen) of the sequence's first head; null if none is removed
  int number;         ///< the item's
  int rows;           ///< rows in use of each head; less than 0 if there is nothing to do
  int first;          ///< row of the sequence
  int batch;
  int head;   ///< the first
  int heads;  ///< at most as many as there are segments
  int segment_log2;
  int done;        ///< heads of the item in earlier passes
  int heads_left;  ///< heads of the item in this pass and later ones
};

/// Finds the pass over work item `number` of a tensor that begins with its `done`-th head. All lanes of a
/// warp call.
template <QuantizeConfig C, Which which>
TANDEM_DEVICE void find_pass(const QuantizeParams& p, int number, int done, Pass& pass) {
  const QuantizedTensor& x = tensor<which>(p);
  const Side side = which == Which::q ? query_side(p) : key_side(p);
  WorkItem item;
  const bool some = locate<C>(side, number, item);
  constexpr ScaleGroup group = which == Which::v ? C.v_scales : C.qk_scales;
  // A group that is larger than a block has a scale even if it has no rows.
  const bool empty = which != Which::v && exceeds_block(C.qk_scales) && item.first == 0;
  pass.rows = some || empty ? max(min(item.used - item.first, quant_block), 0) : -1;
  pass.first = item.first;
  pass.batch = item.batch;
  pass.done = done;
  pass.heads_left = 1;
  pass.heads = 1;
  pass.segment_log2 = log2_segment(quant_block);
  if constexpr (C.varlen) {
    pass.segment_log2 = log2_segment(pass.rows);
    pass.heads_left = min(side.heads_per_item, side.rows.heads - item.head) - done;
    pass.heads = some ? min(pass.heads_left, quant_block >> pass.segment_log2) : pass.heads_left;
    item.head += done;
  }
  pass.head = item.head;
  pass.source = static_cast<const u16*>(x.source) +
                offset_of(x.stride, item, item.begin + static_cast<i64>(item.first));
  pass.quantized = x.quantized + offset_of(x.quantized_stride, item,
                                           which == Which::v ? 0 : item.begin + static_cast<i64>(item.first));
  if constexpr (which == Which::v) pass.quantized += static_cast<i64>(item.block) * quant_block;
  const i64 row = static_cast<i64>(item.block) * quant_block;
  const i64 at = exceeds_block(group) ? 0 : group == ScaleGroup::row ? row : item.block;
  pass.scales = x.scales + offset_of(x.scale_stride, item, at);
  pass.shift = nullptr;
  pass.mean = nullptr;
  if constexpr (C.smooth_k && which != Which::v) {
    if constexpr (which == Which::q) pass.shift = p.shift + offset_of(p.shift_stride, item, row);
    int keys = item.used;  // a sequence without keys has no mean
    if constexpr (which == Which::q) {
      keys = C.varlen ? tile::other_side(key_side(p).rows, item.batch).used : p.rows_k;
    }
    const int head = C.varlen ? 0 : which == Which::q ? item.head / p.group : item.head;
    if (keys > 0) pass.mean = p.mean + item.batch * p.mean_stride.batch + head * p.mean_stride.head;
  }
}

/// Calls f with the tensor of work item `item` of the launch, and the item's number in that tensor. V comes
/// first, then K and Q: the previous launch may still be computing K's mean, which V does not need.
template <QuantizeConfig C, typename F>
TANDEM_DEVICE void with_item(const QuantizeParams& p, int item, F f) {
  if constexpr (C.pv != OperandType::input) {
    if (item < p.items_v) return f(Tag<Which::v>{}, item);
    item -= p.items_v;
  }
  if (item < p.items_k) return f(Tag<Which::k>{}, item);
  item -= p.items_k;
  if (item < p.items_q) f(Tag<Which::q>{}, item);
}

/// Finds the pass over work item `number` of the launch that begins with its `done`-th head, and writes it to
/// shared memory. One warp calls.
template <QuantizeConfig C>
TANDEM_DEVICE void prepare_pass(const QuantizeParams& p, int number, int done, Pass* to) {
  Pass pass{};
  pass.number = number;
  with_item<C>(p, number, [&](auto tag, int n) { find_pass<C, decltype(tag)::which>(p, n, done, pass); });
  if (ptx::thread_index_anew() % warp_size == 0) ptx::store_shared(to, pass);
  ptx::sync_warp();
}

/// Finds passes_at_once passes, each over a whole work item, `number` and every grid_size()-th after it.
/// Lanes find one each, and write it to `passes`. One warp calls.
template <QuantizeConfig C>
TANDEM_DEVICE void prepare_passes(const QuantizeParams& p, int number, char* passes) {
  static_assert(!C.varlen);
  const int lane = static_cast<int>(ptx::lane_index_anew());
  if (lane >= passes_at_once) return;
  Pass pass{};
  pass.number = number + lane * static_cast<int>(ptx::grid_size());
  with_item<C>(p, pass.number, [&](auto tag, int n) { find_pass<C, decltype(tag)::which>(p, n, 0, pass); });
  ptx::store_shared(reinterpret_cast<Pass*>(passes + lane * quantize_pass_bytes), pass);
}

/// Prepares the pass after `before`: over the remaining heads of its work item, or over the next item.
template <QuantizeConfig C>
TANDEM_DEVICE void prepare_next_pass(const QuantizeParams& p, const Pass* before, Pass* to) {
  int number = ptx::load_shared(&before->number);
  int done = 0;
  if constexpr (C.varlen) {
    const int heads = ptx::load_shared(&before->heads);
    if (heads < ptx::load_shared(&before->heads_left)) done = ptx::load_shared(&before->done) + heads;
  }
  if (done == 0) number += static_cast<int>(ptx::grid_size());
  prepare_pass<C>(p, number, done, to);
}

}  // namespace tandem::quantizer
