// The forward pass in 8 bits: as forward.cuh, with e4m3 or s8 operands, scales, and P V promoted to f32 tile
// by tile.
//
// V is stored transposed (K-major, which 8-bit WGMMA wants) with its keys in an order (quantized_layout.hpp)
// in which the scores that a thread has are the P that it has to bring: nothing is shuffled. Method:
// FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), section 3.3; docs/kernels/low-precision.md has the
// arithmetic.
#pragma once

#include "kernels/forward_output.cuh"
#include "kernels/forward_quantized_producer.cuh"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/registers.cuh"
#include "kernels/tile/quantized_softmax.cuh"
#include "kernels/tile/rotate.cuh"

namespace tandem {

// ---- Consumer ----

/// The f32 scores: the accumulators themselves, or what integers are converted into.
template <int n, typename Converted>
TANDEM_DEVICE float (&pick_scores(float (&sums)[n], Converted&))[n] {
  return sums;
}
template <int n>
TANDEM_DEVICE float (&pick_scores(i32 (&)[n], float (&converted)[n]))[n] {
  return converted;
}

template <QuantizedConfig C>
struct QuantizedConsumer {
  using Shared = QuantizedShared<C>;
  static constexpr bool keeps_input = C.pv == Codes::input;
  static constexpr int scores = quant_block / 2;
  static constexpr int outputs = C.head_dim_v / 2;
  static constexpr int part_outputs = C.part_columns() / 2;
  static constexpr int words = keeps_input ? scores / 2 : scores / 4;  ///< of P
  static constexpr Bytes score_bytes = C.qk == Codes::e4m3 ? Bytes::e4m3 : Bytes::s8;
  static constexpr Bytes output_bytes = C.pv == Codes::e4m3 ? Bytes::e4m3 : Bytes::u8;
  using ScoreSum = typename ptx::ByteSum<score_bytes>::type;
  using OutputSum = typename ptx::ByteSum<output_bytes>::type;
  static_assert(C.part_columns() % 16 == 0 && (!keeps_input || C.parts == 1));

  const QuantizedParams& p;
  Shared& shared;
  const int warpgroup;
  const int thread;  ///< in the warpgroup
  const tile::FragmentPosition position;
  typename tile::Ring<C.stages>::Position k_at, v_at;
  typename tile::Ring<C.q_stages>::Position q_at;
  ForwardOutput<C.forward()> output;
  ForwardTiles<C.forward()> tiles;
  // Of the tile that is being computed:
  static constexpr int units = C.row_scales ? 2 : 1;  ///< the thread's rows have one each, or one together
  float q_unit[units];                                ///< scales of rows times the softmax's
  float score_unit[units];                            ///< times that of K's block
  float v_scale;                                      ///< of the block whose scores came last

  TANDEM_DEVICE QuantizedConsumer(const QuantizedParams& params, Shared& s, int warpgroup_, int thread_)
      : p(params),
        shared(s),
        warpgroup(warpgroup_),
        thread(thread_),
        position(thread_),
        output{params.forward, warpgroup_, thread_},
        tiles(params.forward, s.tiles) {}

  TANDEM_DEVICE bool warp_leader() const { return thread % warp_size == 0; }

  TANDEM_DEVICE void take_turn() { take_turn_of<C.pingpong>(warpgroup); }
  TANDEM_DEVICE void pass_turn() { pass_turn_of<C.pingpong, C.consumers()>(warpgroup); }

  TANDEM_DEVICE void issue_scores(ScoreSum (&s)[scores]) {
    const ptx::MatrixDescriptor q = shared.q[warpgroup][q_at.stage].operand();
    const ptx::MatrixDescriptor k = shared.k[k_at.stage].operand();
    ptx::wgmma_fence();
    ptx::wgmma_bytes_shared<quant_block, score_bytes, ptx::Start::fresh>(s, q, k);
#pragma unroll
    for (int step = 1; step < C.head_dim_qk / 32; ++step) {
      ptx::wgmma_bytes_shared<quant_block, score_bytes, ptx::Start::add>(s, q + Shared::QTile::offset(step),
                                                                         k + Shared::KTile::offset(step));
    }
    ptx::wgmma_commit();
  }

  /// Issues P V for the columns of `part`.
  template <ptx::Start start>
  TANDEM_DEVICE void issue_part(OutputSum (&d)[part_outputs], const u32 (&probabilities)[words], int part) {
    const ptx::MatrixDescriptor v = shared.v[v_at.stage].operand();
    ptx::wgmma_fence();
    const int first_row = part * C.part_columns();
    ptx::wgmma_bytes_registers<C.part_columns(), output_bytes, start>(
        d, probabilities, v + Shared::VTile::offset(0, first_row));
#pragma unroll
    for (int step = 1; step < quant_block / 32; ++step) {
      ptx::wgmma_bytes_registers<C.part_columns(), output_bytes, ptx::Start::add>(
          d, probabilities + 4 * step, v + Shared::VTile::offset(step, first_row));
    }
    ptx::wgmma_commit();
  }

  /// Issues O += P V in 16 bits, in O's own accumulators.
  TANDEM_DEVICE void issue_output(float (&o)[outputs], const u32 (&probabilities)[words]) {
    const ptx::MatrixDescriptor v = shared.v[v_at.stage].mn_major();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < quant_block / 16; ++step) {
      ptx::wgmma_registers<C.head_dim_v, C.element, true>(o, probabilities + 4 * step,
                                                          v + Shared::VTile::mn_major_offset(step), true);
    }
    ptx::wgmma_commit();
  }

  /// O += weight * what the tensor cores have of `part`: `count` registers from `first` on. Counts are
  /// constants, or the loop is not unrolled before the one around it, and the registers are indexed.
  template <int count = part_outputs>
  TANDEM_DEVICE void promote(float (&o)[outputs], const OutputSum (&d)[part_outputs], int part,
                             const float (&weight)[2], int first = 0) {
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const int i = first + n;
      float& to = o[part * part_outputs + i];
      if constexpr (output_bytes == Bytes::e4m3) {
        to = ptx::fma(d[i], weight[i / 2 % 2], to);
      } else {
        to = ptx::fma(ptx::to_float(d[i]), weight[i / 2 % 2], to);
      }
    }
  }

  /// P to the A operands of P V: in 8 bits a step's four words have two neighbouring keys of each of two
  /// groups of 8.
  template <int count>
  TANDEM_DEVICE void convert(u32 (&probabilities)[words], const float (&s)[scores], int first) {
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const int i = first + n;
      if constexpr (keeps_input) {
        probabilities[i] = tile::pack<C.element>(s[2 * i], s[2 * i + 1]);
      } else {
        const int at = i / 2 * 8 + i % 2 * 2;
        if constexpr (output_bytes == Bytes::e4m3) {
          probabilities[i] = ptx::pack_e4m3(s[at], s[at + 1], s[at + 4], s[at + 5]);
        } else {
          probabilities[i] = ptx::pack_low_bytes(s[at], s[at + 1], s[at + 4], s[at + 5]);
        }
      }
    }
  }

  /// Scales are read by ordinary loads, which all lanes must have done.
  TANDEM_DEVICE void release_k() {
    ptx::sync_warp();
    if (warp_leader()) shared.k_ring.release(k_at);
    k_at.advance();
  }
  TANDEM_DEVICE void release_v() {
    if constexpr (C.v_row_scales) ptx::sync_warp();
    if (warp_leader()) shared.v_ring.release(v_at);
    v_at.advance();
  }
  TANDEM_DEVICE void release_q() {
    if (warp_leader()) shared.q_ring[warpgroup].release(q_at);
    q_at.advance();
  }

  /// Finds the tile's scales. Rows past the sequence's end, whose results are dropped, take those of its
  /// last.
  TANDEM_DEVICE void find_scales(const ForwardTile<C.forward()>& t) {
    const ForwardParams& f = p.forward;
    const float* of_q = scales_of(p.q_scales, f.packed_q ? 0 : t.index.batch, t.index.head);
#pragma unroll
    for (int h = 0; h < units; ++h) {
      const i64 row = padded_row(t, h);
      q_unit[h] =
          ptx::load_global(of_q + (C.row_scales ? row : row / quant_block) * p.q_scales.stride.group) *
          f.scale * tile::log2_e;
    }
  }
  TANDEM_DEVICE i64 padded_row(const ForwardTile<C.forward()>& t, int h) const {
    const int query = min(t.index.m * C.block_m + warpgroup * 64 + position.row(h), t.index.seqlen_q - 1);
    return static_cast<i64>(first_block(t.index.begin_q, t.index.batch, p.forward.packed_q)) * quant_block +
           query;
  }
  /// Sums of codes to f32, in K's units where those differ by row.
  TANDEM_DEVICE void scale_scores(float (&s)[scores], const ScoreSum (&sums)[scores]) {
    if constexpr (C.qk == Codes::s8) {
#pragma unroll
      for (int i = 0; i < scores; ++i) s[i] = ptx::to_float(sums[i]);
    }
    if constexpr (C.row_scales) {
      const float* scales = shared.k_scales.data[k_at.stage] + position.first_col;
#pragma unroll
      for (int j = 0; j < scores / 4; ++j) {
        const ptx::Float2 k = ptx::load_shared(reinterpret_cast<const ptx::Float2*>(scales + 8 * j));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          s[4 * j + 2 * h] *= k.x;
          s[4 * j + 2 * h + 1] *= k.y;
        }
      }
    }
    // 0, of a block of zeros or from the user, would make -inf NaN. It makes nothing else: all codes are 0.
    constexpr float tiny = 0x1p-100F;
#pragma unroll
    for (int h = 0; h < units; ++h) {
      float unit = q_unit[h];
      if constexpr (!C.row_scales) unit *= ptx::load_shared(&shared.block_scales[k_at.stage].k);
      score_unit[h] = unit < tiny ? tiny : unit;
    }
    if constexpr (!keeps_input && !C.v_row_scales) {
      v_scale = ptx::load_shared(&shared.block_scales[k_at.stage].v);
    }
  }

  /// As in ForwardConsumer; V in 16 bits only, since codes past a sequence's end are 0.
  TANDEM_DEVICE void clear_v_tail(int valid_rows) {
    shared.v_ring.wait(v_at);
    shared.v[v_at.stage].zero_rows(valid_rows, warpgroup * warpgroup_size + thread,
                                   C.consumers() * warpgroup_size);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(barrier_consumers, C.consumers() * warpgroup_size);
  }

  TANDEM_DEVICE void run() {
    ForwardTile<C.forward()> t;
    while (tiles.template next<false>(t, warp_leader())) {
      if (t.blocks.first < t.blocks.end) {
        compute(t);
      } else {
        output.store_empty(t.index);
      }
    }
  }
  TANDEM_DEVICE void compute(const ForwardTile<C.forward()>& t);
  TANDEM_DEVICE void store(const ForwardTile<C.forward()>& t, float (&o)[outputs],
                           const tile::QuantizedSoftmax<C>& softmax);
};

template <QuantizedConfig C>
TANDEM_DEVICE void QuantizedConsumer<C>::compute(const ForwardTile<C.forward()>& t) {
  const int first_query = t.index.m * C.block_m + warpgroup * 64;
  const tile::BlockRange own = tile::BlockRange::of<quant_block>(t.visible, first_query, first_query + 64);
  float o[outputs];
  u32 probabilities[words];
  tile::QuantizedSoftmax<C> softmax;
  int block = t.blocks.end - 1;

  auto wait_next_k = [&] {
    if (block > t.blocks.first) shared.k_ring.wait(k_at);
  };
  // Accumulators are declared where their products begin: declared outside, they would be taken to live
  // through the loop, which d = 256 has no registers for.
  auto maximum = [&](float(&s)[scores], const ScoreSum(&sums)[scores], bool masked) {
    scale_scores(s, sums);
    release_k();
    if (block == t.blocks.first) release_q();
    if (masked) tile::apply_mask(s, t.visible, first_query, block * quant_block, position);
    softmax.update_maximum(s, score_unit);
  };
  // Converts the exponentials of the quarter before this one. Where V's scales join P, all wait for the last.
  constexpr bool joins = C.v_row_scales;
  constexpr int quarter_words = words / 4;
  auto convert_before = [&](float(&s)[scores], int quarter) {
    if (!joins && quarter > 0) convert<quarter_words>(probabilities, s, (quarter - 1) * quarter_words);
  };
  auto finish_probabilities = [&](float(&s)[scores]) {
    if constexpr (joins) {  // V's scales come with its block
      shared.v_ring.wait(v_at);
      softmax.join_scales(s, shared.v_scales.data[v_at.stage] + position.first_col);
      convert<words>(probabilities, s, 0);
    } else {
      convert<quarter_words>(probabilities, s, 3 * quarter_words);
    }
  };
  auto only_scores = [&](bool masked, auto&& meanwhile) {
    ScoreSum sums[scores];
    float converted[C.qk == Codes::s8 ? scores : 1];
    float(&s)[scores] = pick_scores(sums, converted);
    issue_scores(sums);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(sums);
    meanwhile();
    maximum(s, sums, masked);
    softmax.exponentials(s, score_unit, masked, [&](int quarter) { convert_before(s, quarter); });
    wait_next_k();
    finish_probabilities(s);
  };
  // P V of the block before, alone.
  auto finish_output = [&] {
    if constexpr (keeps_input) {
      issue_output(o, probabilities);
      ptx::wgmma_wait<0>();
      ptx::pin_registers(o);
    } else {
      OutputSum held[part_outputs];
      issue_part<ptx::Start::fresh>(held, probabilities, 0);
#pragma unroll
      for (int part = 0; part < C.parts; ++part) {
        ptx::wgmma_wait<0>();
        ptx::pin_registers(held);
        promote(o, held, part, softmax.weight);
        if (part + 1 < C.parts) issue_part<ptx::Start::replace>(held, probabilities, part + 1);
      }
    }
    release_v();
  };

  find_scales(t);
  softmax.reset();
#pragma unroll
  for (int i = 0; i < outputs; ++i) o[i] = 0.0F;
  shared.q_ring[warpgroup].wait(q_at);
  shared.k_ring.wait(k_at);
  only_scores(true, [] {});
  softmax.settle_first(v_scale);
  if constexpr (keeps_input && C.ragged) {
    const int valid_rows = t.index.seqlen_k - block * quant_block;
    if (valid_rows < quant_block) clear_v_tail(valid_rows);
  }

  // S of this block and P V of the block before, in flight together.
  auto overlapped = [&](bool masked) {
    ScoreSum sums[scores];
    float converted[C.qk == Codes::s8 ? scores : 1];
    float(&s)[scores] = pick_scores(sums, converted);
    OutputSum held[part_outputs];
    take_turn();
    issue_scores(sums);
    shared.v_ring.wait(v_at);
    if constexpr (keeps_input) {
      issue_output(o, probabilities);
    } else {
      issue_part<ptx::Start::fresh>(held, probabilities, 0);
    }
    if constexpr (C.parts == 1) pass_turn();
    ptx::wgmma_wait<1>();
    ptx::pin_registers(sums);
    maximum(s, sums, masked);
    if constexpr (C.parts > 1) {
#pragma unroll
      for (int part = 1; part < C.parts; ++part) {
        ptx::wgmma_wait<0>();
        ptx::pin_registers(held);
        promote(o, held, part - 1, softmax.weight);
        issue_part<ptx::Start::replace>(held, probabilities, part);
      }
      pass_turn();
    }
    wait_next_k();
    ptx::wgmma_wait<0>();
    if constexpr (keeps_input) {
      ptx::pin_registers(o);
    } else {
      ptx::pin_registers(held);
    }
    release_v();
    // The exponentials run under the other warpgroups' products, with the promotion and the conversions
    // between them. (Written before the wait for their own product, the assembler moves them behind it.)
    softmax.exponentials(s, score_unit, masked, [&](int quarter) {
      constexpr int size = part_outputs / 4;
      if constexpr (!keeps_input) {
        promote<size>(o, held, C.parts - 1, softmax.weight, quarter * size);
      }
      convert_before(s, quarter);
    });
    finish_probabilities(s);
    softmax.settle(v_scale, o);
  };
  // One after the other: other warpgroups fill the tensor cores meanwhile.
  auto serial = [&](bool masked) {
    shared.v_ring.wait(v_at);
    take_turn();
    finish_output();
    only_scores(masked, [&] { pass_turn(); });
    softmax.settle(v_scale, o);
  };
  auto next_block = [&](bool is_masked) {
    if constexpr (C.overlap) {
      overlapped(is_masked);
    } else {
      serial(is_masked);
    }
  };
  --block;
  tile::walk_blocks<C.causal, C.local>(block, t.blocks, own, next_block);

  shared.v_ring.wait(v_at);
  finish_output();
  store(t, o, softmax);
}

/// Undoes V's rotation, and hands over to the 16-bit kernel's epilogue.
template <QuantizedConfig C>
TANDEM_DEVICE void QuantizedConsumer<C>::store(const ForwardTile<C.forward()>& t, float (&o)[outputs],
                                               const tile::QuantizedSoftmax<C>& softmax) {
  if constexpr (C.rotated_v) tile::rotate_back<C.head_dim_v>(o, position, p.forward.head_dim_v);
  tile::OnlineSoftmax finished;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float shift = 0.0F;
    if (p.shift.data != nullptr) {
      const float* of_q = scales_of(p.shift, p.forward.packed_q ? 0 : t.index.batch, t.index.head);
      shift = ptx::load_global(of_q + padded_row(t, h) * p.shift.stride.group) * tile::log2_e;
    }
    finished.maximum[h] = softmax.reference[h] + shift;
    finished.sum[h] = softmax.sum[h];
  }
  auto& unused =
      *reinterpret_cast<typename ForwardOutput<C.forward()>::Staging*>(shared.q[warpgroup][0].data);
  output.store(t.index, o, finished, 1.0F, unused);
}

// ---- Entry ----

template <QuantizedConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), 1) forward_quantized(const __grid_constant__ QuantizedParams p) {
  static_assert(sizeof(QuantizedShared<C>) == quantized_shared_bytes(C));
  auto& shared = *reinterpret_cast<QuantizedShared<C>*>(ptx::dynamic_shared());
  // Uniform over the warp, and the compiler is to know it.
  const int warp = ptx::warp_uniform(static_cast<int>(ptx::thread_index() / warp_size));
  if (ptx::thread_index() == 0) {
    shared.k_ring.init(C.consumers() * 4);
    shared.v_ring.init(C.consumers() * 4);
    for (int w = 0; w < C.consumers(); ++w) shared.q_ring[w].init(4);
    shared.tiles.ring.init(C.consumers() * 4);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_block();
  ptx::wait_for_previous_grid();  // the quantiser's

  if (warp < 4) {
    ptx::release_registers<C.registers().producer>();
    if (warp == 0) {
      QuantizedLoader<C> loader(p, shared);
      loader.run();
    }
  } else {
    ptx::claim_registers<C.registers().consumer>();
    QuantizedConsumer<C> consumer(p, shared, warp / 4 - 1,
                                  static_cast<int>(ptx::thread_index()) % warpgroup_size);
    if (warp / 4 == C.consumers()) consumer.pass_turn();
    consumer.run();
  }
}

}  // namespace tandem
