// One tile of queries of the forward kernel, as one consumer warpgroup has it: the order of products and
// softmax over the blocks of keys.
#pragma once

#include "ops/forward/sm90/forward_consumer.cuh"

namespace tandem {

/// What the loop keeps in registers. Beside it in one object, the other numbers of a tile would become
/// registers only once loops are unrolled, which costs 44 bytes of local memory at 128 columns (NVRTC 13.0).
template <ForwardConfig C>
struct ForwardState : tile::FunctionRows<C.functions> {
  float o[C.tiling.head_dim_v / 2];
  u32 probabilities[C.tiling.block_n / 4];
  tile::OnlineSoftmax softmax;
};

/// The 64 queries of a warpgroup in one tile.
template <ForwardConfig C>
struct ForwardRows : tile::KeyScale<C.has_byte_keys()> {
  using Consumer = ForwardConsumer<C>;
  static constexpr int scores = Consumer::scores;
  static constexpr int outputs = Consumer::outputs;
  static constexpr bool lists = C.functions.block_lists;
  static constexpr bool own_blocks = C.schedule.own_blocks;
  /// Blocks without a mask keep their rows' maxima; not those that a mask function is asked about, nor with a
  /// score function those of a warp of which a row has seen no key: -inf may have hidden its first ones.
  static constexpr bool lazy_blocks = !C.schedule.invariant && !C.schedule.finds_maxima &&
                                      !C.tiling.max_logits && (!C.functions.mask_function || lists);
  /// Q is released after the last block's softmax, not to delay it; but not if this warp loads, nor at head
  /// dimension 256, where that would put Q's descriptors into ordinary registers.
  static constexpr bool release_q_late = C.schedule.specialised && outputs <= 96;
  /// The next tile is found under the last product (divisions, and a search with varlen), if O leaves
  /// registers for it.
  static constexpr bool find_early = outputs <= 96;
  /// On the diagonal, a warp's rows may see only the left half of the block. Then the exponentials of the
  /// right half are 0 and not computed.
  static constexpr bool halves =
      C.mask.causal && C.tiling.block_n % 32 == 0 && !(own_blocks && C.tiling.block_n == 64);

  Consumer& c;
  tile::QueryTile& t;
  const int first_query;
  const int queries;
  const tile::BlockRange own;
  int visit;  ///< the one whose scores are computed
  tile::KeyVisit at;
  float (&o)[outputs];
  u32 (&probabilities)[scores / 2];
  bool accumulate = false;  ///< there is an O
  tile::OnlineSoftmax& softmax;
  tile::FunctionRows<C.functions>& functions;

  TANDEM_DEVICE ForwardRows(Consumer& consumer, tile::QueryTile& tile, ForwardState<C>& state)
      : c(consumer),
        t(tile),
        first_query(tile::first_query<C.tiling>(c.p, t.index.m, c.warpgroup)),
        queries(tile::queries_of_unit<C.tiling>(c.p)),
        own(own_range(t, first_query, queries)),
        visit(t.blocks.end - 1),
        o(state.o),
        probabilities(state.probabilities),
        softmax(state.softmax),
        functions(state) {
    if constexpr (C.has_byte_keys()) this->key_scale = tile::scale_of(c.p.k_scale, c.p, t.index);
    if constexpr (C.functions.given())
      functions.template set_rows<C.tiling>(c.p, t.index, first_query, c.position);
  }

  /// The blocks of this warpgroup's queries. Where loops count them, ptxas has to know that they are uniform.
  static TANDEM_DEVICE tile::BlockRange own_range(const tile::QueryTile& t, int first_query, int queries) {
    if constexpr (own_blocks) first_query = ptx::warp_uniform(first_query);
    return tile::BlockRange::of<C.tiling.block_n>(t.visible, first_query, first_query + queries);
  }

  // ---- One block ----

  TANDEM_DEVICE void find_block() {
    if constexpr (lists) at = tile::key_visit<C.functions, true>(c.p, t.index, visit);
  }
  /// The blocks that this warpgroup computes.
  TANDEM_DEVICE const tile::BlockRange& blocks() const {
    if constexpr (own_blocks) {
      return own;
    } else {
      return t.blocks;
    }
  }
  TANDEM_DEVICE int block() const { return lists ? at.block : visit; }
  TANDEM_DEVICE int first_key() const { return block() * C.tiling.block_n; }
  TANDEM_DEVICE void wait_next_k() {
    if (visit > blocks().first) c.shared.k_ring.wait(c.k_at);
  }
  TANDEM_DEVICE void release_scores() {
    c.release_k();
    if (!release_q_late && visit == blocks().first) c.release_q();
  }

  /// Logits out of Q K^T. `whole`: the mask function hides nothing of the block.
  TANDEM_DEVICE void make_logits(float (&s)[scores], bool whole) {
    ScoreOptions score = c.p.score;
    if constexpr (C.has_byte_keys()) score.scale *= this->key_scale;
    tile::transform_scores<C.transform>(s, score);
    if constexpr (C.functions.given()) functions.apply(s, first_key() + c.position.first_col, whole);
  }
  /// The logits of a block whose scores are overwritten: from memory.
  TANDEM_DEVICE void load_logits(float (&s)[scores]) {
    tile::load_scores<C.tiling, C.keys, C.key_type, C.row_scales>(s, c.p, t.index, first_query, first_key(),
                                                                  c.position);
    make_logits(s, true);
  }
  template <int n>
  TANDEM_DEVICE void mask(float (&seen)[n]) {
    tile::apply_mask(seen, t.visible, first_query, first_key(),
                     tile::query_position<C.tiling>(c.p, c.position));
  }
  TANDEM_DEVICE void finish_scores(float (&s)[scores], bool masked) {
    c.finish_products(s);
    make_logits(s, lists && !masked);
    if (masked) mask(s);
  }
  TANDEM_DEVICE void drop_probabilities(float (&s)[scores]) {
    functions.drop(s, first_key() + c.position.first_col, c.p);
  }
  /// The exponentials of a block, which the softmax's sum has, as the product with V reads them.
  TANDEM_DEVICE void convert(float (&s)[scores]) {
    drop_probabilities(s);
    tile::convert<C.tiling.element>(probabilities, s);
  }

  // ---- The first block, whose softmax has no product to run under ----

  TANDEM_DEVICE void first_block() {
    float s[scores];
    float rescale[2];
    c.shared.q_ring[c.warpgroup].wait(c.q_at);
    c.shared.k_ring.wait(c.k_at);
    find_block();
    c.issue_scores(s);
    ptx::wgmma_wait<0>();
    if constexpr (halves) {
      c.finish_products(s);
      release_scores();
      make_logits(s, false);
      const int end_key = t.visible.end_key(first_query + (queries - 1)) - first_key();
      if (ptx::ballot(end_key <= C.tiling.block_n / 2) != 0) {
        masked_exponentials(reinterpret_cast<float(&)[scores / 2]>(s), rescale);
#pragma unroll
        for (int i = scores / 2; i < scores; ++i) s[i] = 0.0F;
      } else {
        masked_exponentials(s, rescale);
      }
    } else {
      finish_scores(s, lists || own.needs_mask(block()));
      release_scores();
      softmax.add_block(s, rescale, c.scale_log2);
    }
    c.load_ahead();
    wait_next_k();
    convert(s);
    const int valid_rows = t.index.seqlen_k - first_key();
    if (C.mask.varlen && valid_rows < C.tiling.block_n) c.clear_v_tail(valid_rows);
  }
  template <int n>
  TANDEM_DEVICE void masked_exponentials(float (&seen)[n], float (&rescale)[2]) {
    mask(seen);
    softmax.add_block(seen, rescale, c.scale_log2);
  }

  // ---- The other blocks ----

  /// S of this block and O += P V of the previous one, in flight together.
  template <bool masked>
  TANDEM_DEVICE void overlapped() {
    float s[scores];
    c.pingpong_wait();
    c.issue_scores(s);
    c.shared.v_ring.wait(c.v_at);
    c.issue_output(o, probabilities, accumulate);
    c.pingpong_pass();
    ptx::wgmma_wait<1>();
    finish_scores(s, masked);
    if constexpr (!masked && lazy_blocks) {
      lazy_softmax(s);
    } else {
      exact_softmax(s);
    }
    c.load_ahead();
    wait_next_k();
    accumulate = true;
  }
  TANDEM_DEVICE void wait_output() {
    ptx::wgmma_wait<0>();
    ptx::pin_registers(o);
  }
  /// Exponentials relative to the rows' maxima; O is rescaled among them.
  TANDEM_DEVICE void exact_softmax(float (&s)[scores]) {
    float rescale[2];
    float total[2];
    softmax.update(s, rescale, c.scale_log2);
    wait_output();
    release_scores();
    c.release_v();
    softmax.exponentials(s, total, c.scale_log2, [&](int quarter) {
      tile::scale_rows(o, rescale, quarter * (outputs / 4), (quarter + 1) * (outputs / 4));
      if (quarter == 0 || C.functions.dropout) return;
      tile::convert<C.tiling.element>(probabilities, s, (quarter - 1) * (scores / 4), quarter * (scores / 4));
    });
    drop_probabilities(s);
    tile::convert<C.tiling.element>(probabilities, s, C.functions.dropout ? 0 : 3 * (scores / 4), scores);
    softmax.add(total, rescale);
  }
  /// Exponentials relative to the reference of earlier blocks: no maximum is found, and O is rescaled only if
  /// they are too large.
  TANDEM_DEVICE void lazy_softmax(float (&s)[scores]) {
    float rescale[2];
    float total[2];
    constexpr bool late = C.schedule.output_late;
    const bool begins = C.functions.score_function && ptx::ballot(softmax.has_unseeing()) != 0;
    if constexpr (!late) wait_output();
    release_scores();
    if constexpr (!late) c.release_v();
    if (begins) softmax.update(s, rescale, c.scale_log2);
    softmax.exponentials(s, total, c.scale_log2, [](int) {});
    const bool moved = begins || ptx::ballot(softmax.outgrown(total)) != 0;
    if (!moved) {
      softmax.add(total);
    } else {
      if (begins) {
        softmax.add(total, rescale);
      } else if (!softmax.move(s, total, rescale)) {
        load_logits(s);
        softmax.add_block(s, rescale, c.scale_log2);
      }
      if constexpr (!late) tile::scale_rows(o, rescale);
    }
    if constexpr (late) {
      // Outside the branch, since all warps of a warpgroup must wait for products.
      wait_output();
      c.release_v();
      if (moved) tile::scale_rows(o, rescale);
    }
    convert(s);
  }
  /// Scores and output in sequence (the paper's ablation).
  TANDEM_DEVICE void serial(bool masked) {
    float s[scores];
    float rescale[2];
    c.shared.v_ring.wait(c.v_at);
    c.pingpong_wait();
    c.issue_output(o, probabilities, accumulate);
    wait_output();
    c.release_v();
    c.issue_scores(s);
    ptx::wgmma_wait<0>();
    c.pingpong_pass();
    finish_scores(s, masked);
    release_scores();
    softmax.add_block(s, rescale, c.scale_log2);
    c.load_ahead();
    wait_next_k();
    convert(s);
    tile::scale_rows(o, rescale);
    accumulate = true;
  }
  TANDEM_DEVICE void next_block(bool masked) {
    find_block();
    if constexpr (lists) masked = !at.whole || own.needs_mask(block());
    if constexpr (!C.schedule.overlap) {
      serial(masked);
    } else if (masked) {
      overlapped<true>();
    } else {
      overlapped<false>();
    }
  }

  // ---- The tile ----

  /// Blocks of which this warpgroup's queries see nothing: their buffers go back as they come, when all lanes
  /// have waited for them.
  TANDEM_DEVICE void pass_block() {
    c.shared.k_ring.wait(c.k_at);
    c.shared.v_ring.wait(c.v_at);
    ptx::sync_warp();
    c.release_k();
    c.release_v();
  }
  TANDEM_DEVICE void pass_until(int end) {
    for (; visit >= end; --visit) pass_block();
  }
  /// A tile of which this warpgroup's queries see nothing.
  TANDEM_DEVICE bool run_unseeing() {
    c.shared.q_ring[c.warpgroup].wait(c.q_at);
    ptx::sync_warp();
    c.release_q();
    pass_until(t.blocks.first);
    c.output.template store_unseeing<C.schedule.split>(t.index, t.part);
    return c.find(t);
  }

  /// Computes the tile and replaces it by the next one; false if there is none.
  TANDEM_DEVICE bool run() {
    if constexpr (own_blocks) {
      if (own.first >= own.end) return run_unseeing();
      pass_until(own.end);
    }
    const int passed = own_blocks ? own.first - t.blocks.first : 0;
    first_block();
    --visit;
    if constexpr (lists) {
      for (; visit >= t.blocks.first; --visit) next_block(true);
    } else {
      const auto step = [this](bool masked) { next_block(masked); };
      tile::walk_blocks<C.mask>(visit, blocks(), own, step);
    }
    if constexpr (release_q_late) c.release_q();
    c.shared.v_ring.wait(c.v_at);
    c.issue_output(o, probabilities, accumulate);
    const tile::TileIndex index = t.index;
    const int part = t.part;
    const tile::MergePlace place = t.split;
    bool more = false;
    if constexpr (find_early) more = c.find(t);
    wait_output();
    c.release_v();
    if constexpr (own_blocks) {
      for (int left = ptx::warp_uniform(passed); left > 0; --left) pass_block();
    }
    c.store(index, o, softmax, part, place);
    if constexpr (!find_early) more = c.find(t);
    return more;
  }
};

template <ForwardConfig C>
TANDEM_DEVICE bool ForwardConsumer<C>::compute(tile::QueryTile& t) {
  ForwardState<C> state;
  return ForwardRows<C>(*this, t, state).run();
}

}  // namespace tandem
