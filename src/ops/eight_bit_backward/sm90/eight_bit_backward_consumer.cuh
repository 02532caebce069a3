// What the consumer warpgroups of the 8-bit backward kernel do with one query block, piece by piece: products
// and arithmetic. eight_bit_backward.cuh has the order of the pieces.
#pragma once

#include "ops/eight_bit_backward/sm90/eight_bit_backward_producer.cuh"
#include "ptx/eight_bit.cuh"
#include "tile/backward_scores.cuh"
#include "tile/gradient_units.cuh"
#include "tile/rotate.cuh"

namespace tandem {

template <EightBitBackwardConfig C>
struct EightBitBackwardConsumer : tile::BackwardScores<C, EightBitBackwardShared<C>> {
  using Base = tile::BackwardScores<C, EightBitBackwardShared<C>>;
  using Shared = EightBitBackwardShared<C>;
  using Base::k_at;
  using Base::key_at;
  using Base::position;
  using Base::q_at;
  using Base::scores;
  using Base::shared;
  using Base::thread;
  using Base::threads;
  using Base::warpgroup;
  using typename Base::QPosition;
  static constexpr int words = scores / 4;  ///< each four e4m3

  const EightBitBackwardParams& bytes;
  tile::RingPosition<2> score_at;  ///< which of the two tiles dS is written to

  TANDEM_DEVICE EightBitBackwardConsumer(const EightBitBackwardParams& params, Shared& s, int warpgroup_,
                                         int thread_)
      : Base(params, s, warpgroup_, thread_), bytes(params) {}

  // ---- Products ----

  /// Issues S^T = K Q^T or dP^T = V dO^T.
  template <int head_dim, typename Keys, typename Queries>
  TANDEM_DEVICE void issue_scores(i32 (&s)[scores], const Keys& keys, const Queries& queries) {
    ptx::MatrixDescriptor a = keys.operand() + Keys::offset(0, 1) * static_cast<u32>(key_at());
    ptx::MatrixDescriptor b = queries.operand();
    ptx::forget_address(a);
    ptx::forget_address(b);
    ptx::wgmma_bytes_shared<C.tiling.block_m, Bytes::s8, ptx::Start::fresh>(s, a, b);
#pragma unroll
    for (int step = 1; step < head_dim / 32; ++step) {
      ptx::wgmma_bytes_shared<C.tiling.block_m, Bytes::s8, ptx::Start::add>(s, a + Keys::offset(step),
                                                                            b + Queries::offset(step));
    }
    ptx::wgmma_commit();
  }

  /// Issues dV += P^T dO or dK += dS^T Q.
  template <int columns, typename Rows>
  TANDEM_DEVICE void issue_gradient(float (&d)[columns / 2], const u32 (&operand)[words], const Rows& rows) {
    const ptx::MatrixDescriptor b = rows.operand();
#pragma unroll
    for (int step = 0; step < C.tiling.block_m / 32; ++step) {
      ptx::wgmma_bytes_registers<columns, Bytes::e4m3, ptx::Start::add>(d, operand + 4 * step,
                                                                        b + Rows::offset(step));
    }
    ptx::wgmma_commit();
  }

  /// Issues dQ = dS K for this warpgroup's rows and columns of dQ.
  TANDEM_DEVICE void issue_dq(float (&dq)[C.dq_columns() / 2], const typename Shared::ScoreTile& ds) {
    ptx::MatrixDescriptor a =
        ds.operand() + Shared::ScoreTile::offset(0, 64) * static_cast<u32>(this->dq_row_group());
    ptx::MatrixDescriptor b =
        shared.k_t.operand() + Shared::KTransposed::offset(0, 1) * static_cast<u32>(this->dq_column_at());
    ptx::forget_address(a);
    ptx::forget_address(b);
    ptx::wgmma_bytes_shared<C.dq_columns(), Bytes::e4m3, ptx::Start::fresh>(dq, a, b);
#pragma unroll
    for (int step = 1; step < C.tiling.block_n / 32; ++step) {
      ptx::wgmma_bytes_shared<C.dq_columns(), Bytes::e4m3, ptx::Start::add>(
          dq, a + Shared::ScoreTile::offset(step), b + Shared::KTransposed::offset(step));
    }
    ptx::wgmma_commit();
  }

  // ---- Arithmetic ----

  /// 256 P^T / r of query block m, from S^T. What the mask hides is 0, whatever the exponential is.
  template <bool masked>
  TANDEM_DEVICE void probabilities(const BackwardTile& t, int m, const i32 (&s)[scores],
                                   float (&p_of)[scores]) const {
    const float* lse = this->template from_first_query<const float*>(shared.lse_log2[q_at.stage]);
    const float factor = ptx::load_shared(&shared.q_scale[q_at.stage].x) * ptx::load_shared(&of_tile().x);
    const int query = this->from_first_query(m * C.tiling.block_m);
    int first[2];
    int end[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      this->find_queries(t, t.first_key + key_at() + position.row(h), query, first[h], end[h]);
#pragma unroll
    for (int j = 0; j < scores / 4; ++j) {
      const auto [x, y] = ptx::load_shared(reinterpret_cast<const ptx::Float2*>(lse + 8 * j));
      const float subtract[2] = {x, y};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i / 2;
        const int e = i % 2;
        float value = ptx::exp2(ptx::fma(ptx::to_float(s[4 * j + i]), factor, -subtract[e]));
        if (masked && (8 * j + e < first[h] || (C.mask.local && 8 * j + e >= end[h]))) value = 0.0F;
        p_of[4 * j + i] = value;
      }
    }
  }

  /// The scores of a thread as an operand of dV or dK: four queries of a key in a word, in the order 0, 1, 8,
  /// 9, 2, 3, 10, 11, and so on, which Q and dO transposed have.
  TANDEM_DEVICE void pack(u32 (&packed)[words], const float (&x)[scores]) const {
#pragma unroll
    for (int i = 0; i < words; ++i) {
      const float* const low = x + 8 * (i / 2) + 2 * (i % 2);
      packed[i] = ptx::pack_e4m3(low[0], low[1], low[4], low[5]);
    }
  }

  /// 2^-10 dS^T / (r E) = 256 P^T / r * 2^-18 (dP^T - delta) / E, in P's place.
  TANDEM_DEVICE void score_gradients(float (&p_of)[scores], const i32 (&dp)[scores]) const {
    const float* delta = this->template from_first_query<const float*>(shared.delta[q_at.stage]);
    const float factor = ptx::load_shared(&shared.q_scale[q_at.stage].y) * ptx::load_shared(&of_tile().y);
#pragma unroll
    for (int j = 0; j < scores / 4; ++j) {
      const auto [x, y] = ptx::load_shared(reinterpret_cast<const ptx::Float2*>(delta + 8 * j));
      const float subtract[2] = {x, y};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        p_of[4 * j + i] *= ptx::fma(ptx::to_float(dp[4 * j + i]), factor, -subtract[i % 2]);
    }
  }

  /// Writes this warpgroup's keys of dS, with the keys of a query contiguous: two permutations put keys r and
  /// r + 8 of a query into 16 bits, of which stmatrix transposes 8 by 8. Each 16 keys are in the order 0, 8,
  /// 1, 9, and so on, which K transposed has.
  TANDEM_DEVICE void store_scores(typename Shared::ScoreTile& target, const u32 (&packed)[words]) {
    const int lane = thread % warp_size;
    const int key = key_at() + thread / warp_size * 16;
#pragma unroll
    for (int i = 0; i < words / 4; ++i) {
      u32 pairs[4];
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const u32 low = packed[4 * i + 2 * g];
        const u32 high = packed[4 * i + 2 * g + 1];
        pairs[2 * g] = ptx::permute_bytes(low, high, 0x5140);
        pairs[2 * g + 1] = ptx::permute_bytes(low, high, 0x7362);
      }
      ptx::stmatrix_x4_transposed(target.data + Shared::ScoreTile::place(32 * i + lane, key), pairs[0],
                                  pairs[1], pairs[2], pairs[3]);
    }
  }

  // ---- Tiles ----

  TANDEM_DEVICE DqBuffer<C> dq_buffer() {
    return {shared.dq, warpgroup, thread};
  }
  /// Hands dQ, times what the tile's scales make of it, to the warp that adds it to the sums.
  TANDEM_DEVICE void store_dq(float (&dq)[C.dq_columns() / 2]) {
    const float factor = ptx::load_shared(&of_tile().z);
#pragma unroll
    for (float& x : dq) x *= factor;
    const DqBuffer<C> buffer = dq_buffer();
    buffer.await();
    buffer.store(dq, 0, 0, DqBuffer<C>::vectors);
    buffer.hand_over();
  }

  TANDEM_DEVICE void release(QPosition at) {
    if (thread % warp_size == 0) shared.ring.release(at);
  }

  /// Scales of a tile's K and V.
  TANDEM_DEVICE float scale_of(const QuantizedTensor& x, const BackwardTile& t) const {
    const int block = first_block(t.begin_k, t.batch, bytes.packed_k) + t.n;
    const int entry = bytes.packed_k ? 0 : t.batch;
    return ptx::load_global(x.scales + entry * x.scale_stride.batch + t.head_kv * x.scale_stride.head +
                            block * x.scale_stride.group);
  }
  /// The warpgroup keeps what they make in shared memory: there are no registers for it.
  TANDEM_DEVICE ptx::Float4& of_tile() const {
    return shared.of_tile[warpgroup];
  }
  TANDEM_DEVICE void set_scales(const BackwardTile& t) {
    const float k_scale = scale_of(bytes.quantize.k, t);
    const float v_scale = scale_of(bytes.quantize.v, t);
    ptx::named_barrier_sync(barrier_met + warpgroup, warpgroup_size);
    if (thread == 0) {
      ptx::store_shared(&of_tile(),
                        ptx::Float4{k_scale * this->scale_log2, v_scale, dq_factor * k_scale, 0.0F});
    }
    ptx::named_barrier_sync(barrier_met + warpgroup, warpgroup_size);
  }
  /// dK and dV, out of what the tensor cores have added up.
  TANDEM_DEVICE void store_gradients(const BackwardTile& t, float (&dk)[C.tiling.head_dim_qk / 2],
                                     float (&dv)[C.tiling.head_dim_v / 2], bool any) {
    if (any) {
      const tile::GradientUnits units{bytes.maxima, t.batch * bytes.heads_kv + t.head_kv};
      const float of_dk = dk_factor * tile::power_of_two(units.q_exponent());
      const float of_dv = dv_factor * tile::power_of_two(units.dout_exponent());
#pragma unroll
      for (float& x : dk) x *= of_dk;
#pragma unroll
      for (float& x : dv) x *= of_dv;
      tile::rotate_back<C.tiling.head_dim_qk>(dk, position, bytes.head_dim_qk);
      tile::rotate_back<C.tiling.head_dim_v>(dv, position, bytes.head_dim_v);
    }
    this->store_keys(t, dk);
    this->store_values(t, dv);
  }
};

}  // namespace tandem
