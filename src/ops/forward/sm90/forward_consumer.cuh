// The forward kernel's consumer warpgroups: each computes O and LSE of 64 queries.
#pragma once

#include "ops/forward/config.hpp"
#include "ops/forward/sm90/forward_producer.cuh"
#include "ptx/barrier.cuh"
#include "tile/functions.cuh"
#include "tile/logits.cuh"
#include "tile/mask.cuh"
#include "tile/merged_output.cuh"
#include "tile/pingpong.cuh"
#include "tile/softmax.cuh"

namespace tandem {

template <ForwardConfig C>
struct ForwardConsumer : tile::KeyScale<C.converts()>, tile::FunctionRows<C.functions> {
  using Shared = ForwardShared<C>;
  static constexpr int scores = C.tiling.block_n / 2;
  static constexpr int outputs = C.tiling.head_dim_v / 2;

  const ForwardKernelParams<C>& p;
  Shared& shared;
  const int warpgroup;
  const int thread;  ///< in the warpgroup
  const tile::FragmentPosition position;
  const float scale_log2;
  typename tile::Ring<C.tile_stages()>::Position k_at, v_at;
  typename tile::Ring<C.q_stages>::Position q_at;
  tile::Output<C.tiling, C.schedule.invariant> output;
  ForwardTiles<C> tiles;
  /// Without a producer warp, warp 0 of the consumers loads.
  typename Select<C.schedule.specialised, ForwardNoLoader<C>, ForwardLoader<C>>::type loader;

  TANDEM_DEVICE ForwardConsumer(const ForwardKernelParams<C>& params, Shared& s, int warpgroup_, int thread_)
      : p(params),
        shared(s),
        warpgroup(warpgroup_),
        thread(thread_),
        position(thread_),
        scale_log2((C.transform == ScoreTransform::raw ? params.scale : 1.0F) * tile::log2_e),
        output{{}, params, warpgroup_, thread_},
        tiles(params, s.tiles),
        loader(params, s) {}

  TANDEM_DEVICE bool warp_leader() const { return thread % warp_size == 0; }

  /// What scores of a tile are multiplied by, once its keys are known, what functions need of its rows, and
  /// the first block of its list.
  TANDEM_DEVICE void begin_tile(tile::QueryTile& t, int first_query, int& block) {
    if constexpr (C.converts()) this->key_scale = tile::scale_of(p.k_scale, p, t.index);
    if constexpr (C.functions.given()) this->template take_rows<C.tiling>(p, t.index, first_query, position);
    if constexpr (C.functions.block_lists) this->take_block(block, t.blocks);
  }
  /// Blocks without a mask keep their rows' maxima; not those that a mask function is asked about, nor with a
  /// score function those of a warp of which a row has seen no key: -inf may have hidden its first ones.
  static constexpr bool lazy_blocks = !C.schedule.invariant && !C.schedule.finds_maxima &&
                                      (!C.functions.mask_function || C.functions.block_lists);
  /// Calls step(masked) for each block of a tile but the first, as tile::walk_blocks does, or of its list.
  template <typename Step>
  TANDEM_DEVICE void walk(int& block, tile::BlockRange& all, const tile::BlockRange& own, Step& step) {
    if constexpr (C.functions.block_lists) {
      this->walk_list(block, all, own, step);
    } else {
      tile::walk_blocks<C.mask>(block, all, own, step);
    }
  }
  TANDEM_DEVICE float score_scale() const {
    if constexpr (C.converts()) return p.scale * this->key_scale;
    return p.scale;
  }

  /// Products of the block whose K is read, which are there, times their keys' scales. All lanes have read
  /// these when the warp's first gives the tile back.
  TANDEM_DEVICE void take_products(float (&s)[scores]) {
    ptx::pin_registers(s);
    if constexpr (C.row_scales) {
      tile::scale_columns(s, shared.key_scales.of_row[k_at.stage], position);
      ptx::sync_warp();
    }
  }
  /// Logits out of Q K^T of the block that begins with `key`. `full`: a list says that the mask function
  /// hides nothing of it.
  TANDEM_DEVICE void make_logits(float (&s)[scores], int key, bool full) {
    tile::transform_scores<C.transform>(s, score_scale(), p.softcap);
    if constexpr (C.functions.given()) this->apply(s, key + position.first_col, full);
  }
  /// The logits of a block whose scores are overwritten: from memory.
  TANDEM_DEVICE void load_logits(float (&s)[scores], const tile::TileIndex& t, int first_query, int key) {
    tile::load_scores<C.tiling, C.keys, C.key_type, C.row_scales>(s, p, t, first_query, key, position);
    make_logits(s, key, true);
  }
  /// The exponentials of a block, which the softmax's sum has, as the product with V reads them.
  TANDEM_DEVICE void convert(u32 (&probabilities)[scores / 2], float (&s)[scores], int block) {
    this->drop(s, block * C.tiling.block_n + position.first_col, p);
    tile::convert<C.tiling.element>(probabilities, s);
  }
  /// Without a producer warp: loads one block. It is called after K of this block and V of the previous one
  /// have been released, whose buffers it fills.
  TANDEM_DEVICE void load_ahead() {
    if constexpr (!C.schedule.specialised) {
      if (warpgroup == 0 && thread < warp_size) loader.step();
      ptx::sync_warp();
    }
  }

  TANDEM_DEVICE void pingpong_wait() { tile::pingpong_wait<C.schedule.pingpong>(warpgroup); }
  TANDEM_DEVICE void pingpong_pass() { tile::pingpong_pass<C.schedule.pingpong, C.consumers()>(warpgroup); }

  // The operands of the next products.
  TANDEM_DEVICE ptx::MatrixDescriptor q_operand() const { return shared.q[warpgroup][q_at.stage].k_major(); }
  TANDEM_DEVICE ptx::MatrixDescriptor k_operand() const { return shared.k[k_at.stage].k_major(); }
  TANDEM_DEVICE ptx::MatrixDescriptor v_operand() const { return shared.v[v_at.stage].mn_major(); }

  /// Issues S = Q K^T.
  TANDEM_DEVICE void issue_scores(float (&s)[scores], ptx::MatrixDescriptor q, ptx::MatrixDescriptor k) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C.tiling.head_dim_qk / 16; ++step) {
      ptx::wgmma_shared<C.tiling.block_n, C.tiling.element, false>(
          s, q + Shared::QTile::k_major_offset(step), k + Shared::KTile::k_major_offset(step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Issues O (+)= P V.
  TANDEM_DEVICE void issue_output(float (&o)[outputs], const u32 (&probabilities)[scores / 2],
                                  ptx::MatrixDescriptor v, bool accumulate) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C.tiling.block_n / 16; ++step) {
      ptx::wgmma_registers<C.tiling.head_dim_v, C.tiling.element, true>(
          o, probabilities + 4 * step, v + Shared::VTile::mn_major_offset(step), step != 0 || accumulate);
    }
    ptx::wgmma_commit();
  }

  TANDEM_DEVICE void release_k() {
    if (warp_leader()) shared.k_ring.release(k_at);
    k_at.advance();
  }
  TANDEM_DEVICE void release_v() {
    if (warp_leader()) shared.v_ring.release(v_at);
    v_at.advance();
  }

  TANDEM_DEVICE void release_q() {
    if (warp_leader()) shared.q_ring[warpgroup].release(q_at);
    q_at.advance();
  }

  /// Rows of V past the sequence's end may hold anything, and 0 * NaN is NaN: the consumers clear them in
  /// shared memory before the first product. Only the rightmost block has such rows, and only with varlen:
  /// otherwise TMA fills them with zeros.
  TANDEM_DEVICE void clear_v_tail(int valid_rows) {
    shared.v_ring.wait(v_at);
    shared.v[v_at.stage].zero_rows(valid_rows, warpgroup * warpgroup_size + thread,
                                   C.tiling.block_m / 64 * warpgroup_size);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(tile::barrier_consumers, C.consumers() * warpgroup_size);
  }

  TANDEM_DEVICE void run() {
    load_ahead();
    tile::QueryTile t;
    bool more = find(t);
    while (more) {
      if (t.blocks.first < t.blocks.end) {
        more = compute(t);
      } else {
        output.template store_unseeing<C.schedule.split>(t.index, t.part);
        more = find(t);
      }
    }
  }
  /// The epilogue.
  TANDEM_DEVICE void store(const tile::TileIndex& t, float (&o)[outputs], tile::OnlineSoftmax& softmax,
                           int part, const tile::MergePlace& place) {
    if constexpr (!C.functions.hide()) tile::find_infinite<C.mask>(softmax, output, t);
    if constexpr (C.converts()) {
      const float v_scale = tile::scale_of(p.v_scale, p, t);
#pragma unroll
      for (int i = 0; i < outputs; ++i) o[i] *= v_scale;
    }
    if constexpr (C.functions.dropout) this->scale_kept(o, p);
    if (C.schedule.split && part != tile::whole_tile) {
      if constexpr (C.schedule.invariant) return output.store_split(t, o, softmax, place, part);
      output.store_part(t, o, softmax, part);
    } else if constexpr (C.schedule.invariant) {
      output.template store_merged<C.schedule.split>(t, o, softmax, place);
    } else {
      output.store(t, o, softmax);
    }
  }
  TANDEM_DEVICE bool find(tile::QueryTile& t) {
    if constexpr (C.functions.block_lists) {
      const bool found = tiles.template next<false>(t, warp_leader());
      if (found) t.blocks = tile::listed_blocks(p.functions.lists, t.index);
      return found;
    } else {
      return tiles.template next<false>(t, warp_leader());
    }
  }
  TANDEM_DEVICE bool compute(tile::QueryTile& t);
};

/// Computes tile `t` and replaces it by the next one; false if there is none.
template <ForwardConfig C>
TANDEM_DEVICE bool ForwardConsumer<C>::compute(tile::QueryTile& t) {
  const int first_query = C.tiling.heads_as_rows ? tile::first_query<C.tiling>(p, t.index.m, warpgroup)
                                                 : t.index.m * C.tiling.block_m + warpgroup * 64;
  const int queries = tile::queries_of_unit<C.tiling>(p);
  const tile::BlockRange own =
      tile::BlockRange::of<C.tiling.block_n>(t.visible, first_query, first_query + queries);
  float s[scores];
  float o[outputs];
  u32 probabilities[scores / 2];
  tile::OnlineSoftmax softmax;
  float rescale[2];
  float total[2];
  int block = t.blocks.end - 1;
  begin_tile(t, first_query, block);
  const auto nothing = [](int) {};
  // Q is released after the last block's softmax, not to delay it; but not if this warp loads, nor at head
  // dimension 256, where that would put Q's descriptors into ordinary registers.
  constexpr bool release_q_late = C.schedule.specialised && outputs <= 96;
  auto release_scores = [&] {
    release_k();
    if (!release_q_late && block == t.blocks.first) release_q();
  };
  auto take_scores = [&](bool masked) {
    take_products(s);
    make_logits(s, block * C.tiling.block_n, C.functions.block_lists && !masked);
    if (masked) {
      tile::apply_mask(s, t.visible, first_query, block * C.tiling.block_n,
                       tile::query_position<C.tiling>(p, position));
    }
  };
  auto exponentials = [&](auto& seen) {
    softmax.update(seen, rescale, scale_log2);
    softmax.exponentials(seen, total, scale_log2, nothing);
    softmax.add(total, rescale);
  };
  auto rescale_output = [&](int first, int end) {
#pragma unroll
    for (int i = first; i < end; ++i) o[i] *= rescale[i / 2 % 2];
  };
  auto wait_next_k = [&] {
    if (block > t.blocks.first) shared.k_ring.wait(k_at);
  };

  // The first block: its softmax has no product to run under.
  shared.q_ring[warpgroup].wait(q_at);
  shared.k_ring.wait(k_at);
  issue_scores(s, q_operand(), k_operand());
  ptx::wgmma_wait<0>();
  // On the diagonal, a warp's rows may see only the left half of the block. Then the exponentials of the
  // right half are 0 and not computed.
  constexpr bool halves = C.mask.causal && C.tiling.block_n % 32 == 0;
  if constexpr (halves) {
    take_products(s);
    release_scores();
    make_logits(s, block * C.tiling.block_n, false);
    auto masked_exponentials = [&](auto& seen) {
      tile::apply_mask(seen, t.visible, first_query, block * C.tiling.block_n,
                       tile::query_position<C.tiling>(p, position));
      exponentials(seen);
    };
    if (ptx::ballot(t.visible.end_key(first_query + (queries - 1)) - block * C.tiling.block_n <=
                    C.tiling.block_n / 2) != 0) {
      masked_exponentials(reinterpret_cast<float(&)[scores / 2]>(s));
#pragma unroll
      for (int i = scores / 2; i < scores; ++i) s[i] = 0.0F;
    } else {
      masked_exponentials(s);
    }
  } else {
    take_scores(C.functions.block_lists || block >= own.inner_end || block < own.inner_first);
    release_scores();
    exponentials(s);
  }
  load_ahead();
  wait_next_k();
  convert(probabilities, s, block);
  if (C.mask.varlen && (block + 1) * C.tiling.block_n > t.index.seqlen_k)
    clear_v_tail(t.index.seqlen_k - block * C.tiling.block_n);

  bool accumulate = false;
  // S of this block and O += P V of the previous one, in flight together. A block without a mask is rescaled
  // lazily: its exponentials are relative to the reference of earlier blocks, no maximum is found, and O is
  // rescaled only if the exponentials are too large.
  auto iteration = [&](auto masked) {
    constexpr bool lazy = !decltype(masked)::value && lazy_blocks;
    pingpong_wait();
    issue_scores(s, q_operand(), k_operand());
    shared.v_ring.wait(v_at);
    issue_output(o, probabilities, v_operand(), accumulate);
    pingpong_pass();
    ptx::wgmma_wait<1>();
    take_scores(masked.value);
    if constexpr (!lazy) softmax.update(s, rescale, scale_log2);
    auto take_output = [&] {
      ptx::wgmma_wait<0>();
      ptx::pin_registers(o);
    };
    constexpr bool late = lazy && C.schedule.output_late;
    const bool begins = lazy && C.functions.score_function && ptx::ballot(softmax.has_unseeing()) != 0;
    if constexpr (!late) take_output();
    release_scores();
    if constexpr (!late) release_v();
    if constexpr (!lazy) {
      softmax.exponentials(s, total, scale_log2, [&](int quarter) {
        rescale_output(quarter * (outputs / 4), (quarter + 1) * (outputs / 4));
        if (quarter == 0 || C.functions.dropout) return;
        tile::convert<C.tiling.element>(probabilities, s, (quarter - 1) * (scores / 4),
                                        quarter * (scores / 4));
      });
      this->drop(s, block * C.tiling.block_n + position.first_col, p);
      tile::convert<C.tiling.element>(probabilities, s, C.functions.dropout ? 0 : 3 * (scores / 4), scores);
      softmax.add(total, rescale);
    } else {
      if (begins) softmax.update(s, rescale, scale_log2);
      softmax.exponentials(s, total, scale_log2, nothing);
      const bool moved = begins || ptx::ballot(softmax.outgrown(total)) != 0;
      if (!moved) {
        softmax.add(total);
      } else {
        if (begins) {
          softmax.add(total, rescale);
        } else if (!softmax.move(s, total, rescale)) {
          load_logits(s, t.index, first_query, block * C.tiling.block_n);
          exponentials(s);
        }
        if constexpr (!late) rescale_output(0, outputs);
      }
      if constexpr (late) {
        // Outside the branch, since all warps of a warpgroup must wait for products.
        take_output();
        release_v();
        if (moved) rescale_output(0, outputs);
      }
      convert(probabilities, s, block);
    }
    load_ahead();
    wait_next_k();
    accumulate = true;
  };
  // The same in sequence (the paper's ablation).
  auto serial_iteration = [&](bool masked) {
    shared.v_ring.wait(v_at);
    pingpong_wait();
    issue_output(o, probabilities, v_operand(), accumulate);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(o);
    release_v();
    issue_scores(s, q_operand(), k_operand());
    ptx::wgmma_wait<0>();
    pingpong_pass();
    take_scores(masked);
    release_scores();
    exponentials(s);
    load_ahead();
    wait_next_k();
    convert(probabilities, s, block);
    rescale_output(0, outputs);
    accumulate = true;
  };
  auto next_block = [&](bool masked) {
    if constexpr (!C.schedule.overlap) {
      serial_iteration(masked);
    } else if (masked) {
      iteration(Truth<true>{});
    } else {
      iteration(Truth<false>{});
    }
  };
  --block;
  walk(block, t.blocks, own, next_block);
  if constexpr (release_q_late) release_q();

  shared.v_ring.wait(v_at);
  issue_output(o, probabilities, v_operand(), accumulate);
  // The next tile is found under the last product (divisions, and a search with varlen), if O leaves
  // registers for it.
  constexpr bool find_early = outputs <= 96;
  const tile::TileIndex index = t.index;
  const int part = t.part;
  const tile::MergePlace place = t.split;
  bool more = false;
  if constexpr (find_early) more = find(t);
  ptx::wgmma_wait<0>();
  ptx::pin_registers(o);
  release_v();
  store(index, o, softmax, part, place);
  if constexpr (!find_early) more = find(t);
  return more;
}

}  // namespace tandem
