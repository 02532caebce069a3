// The quantiser's units of work, and how a block of threads finds its next one.
#pragma once

#include "kernels/config/quantize.hpp"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/warp.cuh"
#include "kernels/tile/scheduler.cuh"

namespace tandem::quantizer {

/// 128 rows of a head of one sequence, or of several heads where sequences are short.
struct Unit {
  int batch;  ///< the sequence
  int entry;  ///< in tensors: the batch index, 0 if packed
  int head;
  int first;   ///< row of the sequence
  int begin;   ///< first row of the sequence in the tensor
  int used;    ///< rows in use
  int block;   ///< on the axis of quantized_layout.hpp
  int blocks;  ///< of the rows in use
};

struct Side {
  tile::VarlenSide rows;
  int blocks;    ///< of 128 rows (equal lengths)
  int together;  ///< heads of a unit
};
TANDEM_DEVICE Side query_side(const QuantizeParams& p) {
  return {{p.cu_seqlens_q, p.seqused_q, p.rows_q, p.batch, p.heads_q, p.packed_q}, p.blocks_q, p.together_q};
}
TANDEM_DEVICE Side key_side(const QuantizeParams& p) {
  return {{p.cu_seqlens_k, p.seqused_k, p.rows_k, p.batch, p.heads_kv, p.packed_k}, p.blocks_k, p.together_k};
}

/// The last of packed sequences whose first block is not past `block`.
TANDEM_DEVICE int sequence_of_block(const tile::VarlenSide& side, int block) {
  const int lane = static_cast<int>(ptx::thread_index_anew()) % warp_size;
  return tile::last_not_past(lane, side.batch, block, [&](int b) {
    return first_block(tile::sequence_rows(side.cu, {nullptr, 0, false}, side.rows, b).begin, b, true);
  });
}

/// False where the unit has no row in use. Its first head is found; heads of a block are neighbours in the
/// tensor and in number. All lanes of a warp call.
template <QuantizeConfig C>
TANDEM_DEVICE bool locate(const Side& side, int number, Unit& u) {
  const int of_block = C.varlen ? ceil_div(side.rows.heads, side.together) : side.rows.heads;
  const int block = number / of_block;
  u.head = (number - block * of_block) * (C.varlen ? side.together : 1);
  u.begin = 0;
  u.used = side.rows.rows;
  if (C.varlen && side.rows.packed) {
    u.batch = sequence_of_block(side.rows, block);
  } else {
    u.batch = block / side.blocks;
  }
  if constexpr (C.varlen) {
    const tile::SequenceRows rows =
        tile::sequence_rows(side.rows.cu, side.rows.used, side.rows.rows, u.batch);
    u.begin = rows.begin;
    u.used = rows.used;
  }
  const bool packed = C.varlen && side.rows.packed;
  u.entry = packed ? 0 : u.batch;
  u.block = packed ? block : block - u.batch * side.blocks;
  u.first = (u.block - first_block(u.begin, u.batch, packed)) * quant_block;
  u.blocks = ceil_div(u.used, quant_block);
  return u.first >= 0 && u.first < u.used;
}

TANDEM_DEVICE i64 offset_of(const Strides& s, const Unit& u, i64 row) {
  return u.entry * s.batch + row * s.row + u.head * s.head;
}
TANDEM_DEVICE i64 offset_of(const ScaleStrides& s, const Unit& u, i64 group) {
  return u.entry * s.batch + u.head * s.head + group * s.group;
}

/// Where sequences are short, a unit's rows are divided among heads in slots of 16, 32 or 64: the power of
/// two that `rows` of one head need.
TANDEM_DEVICE int slot_shift(int rows) {
  return rows <= 16 ? 4 : rows <= 32 ? 5 : rows <= 64 ? 6 : 7;
}

enum class Which : int { q, k, v };

template <Which which>
TANDEM_DEVICE const QuantizedTensor& tensor(const QuantizeParams& p) {
  return which == Which::q ? p.q : which == Which::k ? p.k : p.v;
}

/// A tensor as a type.
template <Which w>
struct Tag {
  static constexpr Which which = w;
};

/// What a block of threads does between two barriers: a unit, or as many heads of it as there are slots. One
/// lane finds it and leaves it in shared memory, a job ahead: with every warp finding the unit for itself,
/// twice, divisions and strides were a third of all instructions.
struct alignas(16) Job {
  const u16* source;  ///< of the first row
  u8* codes;          ///< of the first row; of V's first channel and key
  float* scales;      ///< of the group, or of the first row
  float* shift;       ///< of the first row (Q)
  const float* mean;  ///< of the head, or (varlen) of the sequence's first; null where none is removed
  int number;         ///< of the unit
  int rows;           ///< in use of each head; less than 0 where there is nothing to do
  int first;          ///< row of the sequence
  int batch;
  int head;   ///< the first
  int heads;  ///< at most as many as there are slots
  int shift_of_slot;
  int done;        ///< heads of the unit before them
  int heads_left;  ///< of the unit, with this job's
};

/// The job of unit `number` of a tensor, from the `done`-th head of it on. All lanes of a warp call.
template <QuantizeConfig C, Which which>
TANDEM_DEVICE void find_job(const QuantizeParams& p, int number, int done, Job& job) {
  const QuantizedTensor& x = tensor<which>(p);
  const Side side = which == Which::q ? query_side(p) : key_side(p);
  Unit u;
  const bool some = locate<C>(side, number, u);
  constexpr ScaleGroup group = which == Which::v ? C.v_scales : C.qk_scales;
  // Groups that are larger than blocks have a scale without rows too.
  const bool empty = which != Which::v && exceeds_block(C.qk_scales) && u.first == 0;
  job.rows = some || empty ? max(min(u.used - u.first, quant_block), 0) : -1;
  job.first = u.first;
  job.batch = u.batch;
  job.done = done;
  job.heads_left = 1;
  job.heads = 1;
  job.shift_of_slot = slot_shift(quant_block);
  if constexpr (C.varlen) {
    job.shift_of_slot = slot_shift(job.rows);
    job.heads_left = min(side.together, side.rows.heads - u.head) - done;
    job.heads = some ? min(job.heads_left, quant_block >> job.shift_of_slot) : job.heads_left;
    u.head += done;
  }
  job.head = u.head;
  job.source =
      static_cast<const u16*>(x.source) + offset_of(x.stride, u, u.begin + static_cast<i64>(u.first));
  job.codes =
      x.codes + offset_of(x.code_stride, u, which == Which::v ? 0 : u.begin + static_cast<i64>(u.first));
  if constexpr (which == Which::v) job.codes += static_cast<i64>(u.block) * quant_block;
  const i64 row = static_cast<i64>(u.block) * quant_block;
  const i64 at = exceeds_block(group) ? 0 : group == ScaleGroup::row ? row : u.block;
  job.scales = x.scales + offset_of(x.scale_stride, u, at);
  job.shift = nullptr;
  job.mean = nullptr;
  if constexpr (C.smooth_k && which != Which::v) {
    if constexpr (which == Which::q) job.shift = p.shift + offset_of(p.shift_stride, u, row);
    int keys = u.used;  // a sequence without keys has no mean
    if constexpr (which == Which::q) {
      keys = C.varlen ? tile::other_side(key_side(p).rows, u.batch).used : p.rows_k;
    }
    const int head = C.varlen ? 0 : which == Which::q ? u.head / p.group : u.head;
    if (keys > 0) job.mean = p.mean + u.batch * p.mean_stride.batch + head * p.mean_stride.head;
  }
}

/// The units of a launch: of V, then of K and of Q, so that K's mean, which a launch before may still be
/// adding up, is not waited for at once. Calls f with the tensor and the number of the unit among its own.
template <QuantizeConfig C, typename F>
TANDEM_DEVICE void with_unit(const QuantizeParams& p, int unit, F f) {
  if constexpr (C.pv != Codes::input) {
    if (unit < p.units_v) return f(Tag<Which::v>{}, unit);
    unit -= p.units_v;
  }
  if (unit < p.units_k) return f(Tag<Which::k>{}, unit);
  unit -= p.units_k;
  if (unit < p.units_q) f(Tag<Which::q>{}, unit);
}

/// Finds the job of unit `number` from its `done`-th head on. One warp calls.
template <QuantizeConfig C>
TANDEM_DEVICE void prepare_job(const QuantizeParams& p, int number, int done, Job* to) {
  Job job{};
  job.number = number;
  with_unit<C>(p, number, [&](auto tag, int n) { find_job<C, decltype(tag)::which>(p, n, done, job); });
  if (ptx::thread_index_anew() % warp_size == 0) ptx::store_shared(to, job);
  ptx::sync_warp();
}

/// The job after `before`: the other heads of its unit, or the next unit.
template <QuantizeConfig C>
TANDEM_DEVICE void prepare_job_after(const QuantizeParams& p, const Job* before, Job* to) {
  int number = ptx::load_shared(&before->number);
  int done = 0;
  if constexpr (C.varlen) {
    const int heads = ptx::load_shared(&before->heads);
    if (heads < ptx::load_shared(&before->heads_left)) done = ptx::load_shared(&before->done) + heads;
  }
  if (done == 0) number += static_cast<int>(ptx::grid_size());
  prepare_job<C>(p, number, done, to);
}

}  // namespace tandem::quantizer
