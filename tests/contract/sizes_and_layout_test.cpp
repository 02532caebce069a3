// Contract lines 9 to 11: sizes, strides and head dimensions.
#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

// 9. 64-bit offsets everywhere; batch, heads and blocks beyond 65,535 work; tensors beyond 2^31 elements
// work.

TEST(Contract09_Sizes, BatchBeyond65535) {
  Case c = with(plain_case(DType::f32), {.batch = 70000, .heads = 1, .head_dim = 8, .seqlen_q = 2});
  change(c, {.seqlen_k = 3, .threads = 2});
  run_everywhere(c);
}

TEST(Contract09_Sizes, HeadsBeyond65535) {
  Case c = with(plain_case(DType::bf16), {.batch = 1, .heads_q = 70000, .heads_kv = 35000, .head_dim = 8});
  change(c, {.seqlen_q = 1, .seqlen_k = 2, .threads = 2});
  run_everywhere(c);
}

TEST(Contract09_Sizes, SequencesBeyond65535) {
  Case c = with(varlen_case(DType::f32, std::vector<std::int64_t>(70000, 1)), {.heads = 1, .head_dim = 8});
  c.lengths_q[5] = c.lengths_k[5] = 40;
  c.threads = 2;
  run_everywhere(c);
}

TEST(Contract09_Sizes, QueryBlocksBeyond65535) {
  Case c = with(plain_case(DType::f16), {.batch = 1, .heads = 1, .head_dim = 8});
  c.seqlen_q = 66000 * 16;  // more blocks than 65,535 for tiles of up to 16 rows
  change(c, {.seqlen_k = 1, .threads = 2});
  c.q.expanded = 0b0010;  // one row of memory
  c.dout.expanded = 0b0010;
  Call call(c);
  run_everywhere(call, false);
}

/// Elements so far apart that a tensor spans more than 2^32 of them; only the pages touched take memory.
Layout far_apart(std::int64_t pad) {
  Layout layout;
  layout.pad = pad;
  layout.sparse = true;
  return layout;
}

TEST(Contract09_Sizes, TensorsBeyond2To31Elements) {
  for (const DType dtype : float_dtypes) {
    Case c = with(plain_case(dtype), {.batch = 2, .heads_q = 2, .heads_kv = 1, .head_dim = 64, .seqlen = 70});
    constexpr std::int64_t span = (std::int64_t{1} << 32) + (std::int64_t{1} << 30);
    c.q = c.out = c.dq = c.dout = far_apart(span / (2 * 70 * 2));
    c.k = c.v = c.dk = c.dv = far_apart(span / (2 * 70));
    run_everywhere(c);
    Case packed = with(varlen_case(dtype, {70, 30}), {.heads = 1});
    packed.q = packed.out = packed.dq = packed.dout = packed.k = packed.v = packed.dk = packed.dv =
        far_apart(span / 100);
    run_everywhere(packed);
  }
}

// 10. Any strides with a contiguous last dimension; the result is the same.

struct NamedLayout {
  const char* name;
  Layout layout;
};

std::vector<NamedLayout> layouts(bool input) {
  std::vector<NamedLayout> all{
      {"slice of a fused QKV", {.order = {}, .slices = 3, .slice = 1}},
      {"heads before rows", {.order = {0, 2, 1, 3}}},
      {"rows before batch", {.order = {1, 0, 2, 3}}},
      {"heads outermost", {.order = {2, 0, 1, 3}}},
      {"padded rows", {.order = {}, .pad = 13}},
      {"element-aligned base", {.order = {}, .base_offset = 1}},
      {"odd everything", {.order = {2, 1, 0, 3}, .pad = 5, .slices = 2, .slice = 1, .base_offset = 7}},
      {"ends at a page", {.order = {}, .ends_at_guard = true}},
      {"ends at a page, padded", {.order = {0, 2, 1, 3}, .pad = 3, .ends_at_guard = true}},
  };
  if (input) {
    all.push_back({"one batch entry for all", {.order = {}, .expanded = 0b0001}});
    all.push_back({"one row for all", {.order = {}, .expanded = 0b0010}});
    all.push_back({"one head for all", {.order = {}, .expanded = 0b0100}});
    all.push_back({"one vector for all", {.order = {}, .expanded = 0b0111}});
  }
  return all;
}

/// The same values in contiguous memory.
Call contiguous_copy(const Call& call) {
  Case c = call.spec;
  c.q = c.k = c.v = c.out = c.dout = c.dq = c.dk = c.dv = c.lse_layout = Layout{};
  Call plain(c);
  copy(call.q, plain.q);
  copy(call.k, plain.k);
  copy(call.v, plain.v);
  if (call.dout.given()) copy(call.dout, plain.dout);
  return plain;
}

TEST(Contract10_Strides, InputsInAnyLayoutGiveTheSameBits) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::e4m3}) {
    for (const auto& [name, layout] : layouts(true)) {
      SCOPED_TRACE(name);
      Case c = with(plain_case(dtype), {.seqlen = 70, .causal = true, .deterministic = true});
      c.q = c.k = c.v = c.dout = layout;
      Call call(c);
      Call plain = contiguous_copy(call);
      on_every_runner(c,
                      [&](Runner& runner) { EXPECT_TRUE(same_bits(run(runner, call), run(runner, plain))); });
    }
  }
}

TEST(Contract10_Strides, OutputsInAnyLayoutGiveTheSameBits) {
  for (const DType dtype : float_dtypes) {
    for (const auto& [name, layout] : layouts(false)) {
      SCOPED_TRACE(name);
      Case c = with(plain_case(dtype), {.deterministic = true});
      c.out = c.dq = c.dk = c.dv = layout;
      c.lse_layout = Layout{.order = {1, 0, 2}, .pad = 9, .base_offset = 1};
      run_everywhere(c);  // also that nothing between the elements is written
      Call call(c);
      Call plain = contiguous_copy(call);
      on_every_runner(c,
                      [&](Runner& runner) { EXPECT_TRUE(same_bits(run(runner, call), run(runner, plain))); });
    }
  }
}

TEST(Contract10_Strides, SizeOneDimensionsMayHaveAnyStride) {
  const Layout odd{.order = {}, .odd_unit_strides = true};
  for (const DType dtype : float_dtypes) {
    Case c = with(plain_case(dtype), {.batch = 1, .heads = 1});
    c.q = c.k = c.v = c.out = c.dout = c.dq = c.dk = c.dv = c.lse_layout = odd;
    run_everywhere(c);
    c.seqlen_q = 1;
    run_everywhere(c);
    change(c, {.seqlen_q = 9, .seqlen_k = 1});
    run_everywhere(c);
    change(c, {.head_dim_qk = 8, .head_dim_v = 16});
    run_everywhere(c);
  }
}

TEST(Contract10_Strides, FusedQkvAndItsGradientInOneBufferEach) {
  constexpr std::int64_t batch = 2, rows = 70, heads = 3, d = 40;
  for (const DType dtype : float_dtypes) {
    Case c = with(plain_case(dtype), {.batch = batch, .heads = heads, .head_dim = d, .seqlen = rows});
    c.options.causal = true;
    Call call(c);
    const Expected expected = expect(call, Pass::backward);
    Box fused(dtype, {batch, rows, 3 * heads, d}, {}, false);
    Box fused_gradient(dtype, {batch, rows, 3 * heads, d}, {}, true);
    const auto slice = [&](const Box& box, std::int64_t which) {
      Tensor t = box.view();
      t.shape[2] = heads;
      t.data =
          static_cast<std::byte*>(t.data) + which * heads * d * static_cast<std::int64_t>(size_of(dtype));
      return t;
    };
    for (std::int64_t n = 0; n < call.q.numel(); ++n) {
      const std::int64_t row = n / (heads * d);
      const std::int64_t at = row * 3 * heads * d + n % (heads * d);
      fused.set(at, call.q.get(n));
      fused.set(at + heads * d, call.k.get(n));
      fused.set(at + 2 * heads * d, call.v.get(n));
    }
    BackwardArgs args = call.backward_args();
    args.q = slice(fused, 0);
    args.k = slice(fused, 1);
    args.v = slice(fused, 2);
    args.dq = slice(fused_gradient, 0);
    args.dk = slice(fused_gradient, 1);
    args.dv = slice(fused_gradient, 2);
    ForwardArgs forward_args = call.forward_args();
    forward_args.q = args.q;
    forward_args.k = args.k;
    forward_args.v = args.v;
    tandem::forward(forward_args);
    tandem::backward(args);
    for (std::int64_t n = 0; n < call.q.numel(); ++n) {
      const std::int64_t row = n / (heads * d);
      const std::int64_t at = row * 3 * heads * d + n % (heads * d);
      call.dq.set(n, fused_gradient.get(at));
      call.dk.set(n, fused_gradient.get(at + heads * d));
      call.dv.set(n, fused_gradient.get(at + 2 * heads * d));
    }
    EXPECT_TRUE(matches("dq", call.dq, expected.dq));
    EXPECT_TRUE(matches("dk", call.dk, expected.dk));
    EXPECT_TRUE(matches("dv", call.dv, expected.dv));
    EXPECT_EQ(fused_gradient.changed_outside(), "");
  }
}

// 11. Head dimensions: any multiple of 8 up to 256, d_v != d_qk; others refused or padded. GQA and MQA with
// any ratio.

TEST(Contract11_HeadDims, EveryMultipleOf8) {
  for (std::int64_t d = 8; d <= 256; d += 8) {
    Case c = plain_case(d % 24 == 0 ? DType::f16 : d % 16 == 0 ? DType::f32 : DType::bf16);
    change(c, {.batch = 1, .head_dim = d, .seqlen_q = 33, .seqlen_k = 70, .causal = true});
    run_everywhere(c);
  }
}

TEST(Contract11_HeadDims, ValuesOfAnotherDimension) {
  for (const DType dtype : float_dtypes) {
    for (const auto& [d_qk, d_v] :
         {std::pair{192, 128}, {128, 192}, {8, 256}, {256, 8}, {40, 72}, {64, 104}}) {
      run_everywhere(with(plain_case(dtype), {.batch = 1, .head_dim_qk = d_qk, .head_dim_v = d_v}));
    }
  }
}

TEST(Contract11_HeadDims, OthersArePaddedInside) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::e4m3}) {
    for (const auto& [d_qk, d_v] : {std::pair{1, 1}, {65, 65}, {7, 33}, {64, 3}, {255, 129}}) {
      Case c = with(plain_case(dtype), {.head_dim_qk = d_qk, .head_dim_v = d_v});
      run_everywhere(c);
      c.q.ends_at_guard = c.k.ends_at_guard = c.v.ends_at_guard = c.out.ends_at_guard = true;
      c.dq.ends_at_guard = c.dk.ends_at_guard = c.dv.ends_at_guard = c.dout.ends_at_guard = true;
      run_everywhere(c);
    }
  }
}

TEST(Contract11_HeadDims, QueryHeadsInAnyRatio) {
  for (const DType dtype : float_dtypes) {
    for (const auto& [heads_q, heads_kv] : {std::pair{1, 1}, {5, 1}, {6, 3}, {7, 7}, {16, 2}, {48, 1}}) {
      Case c = with(plain_case(dtype), {.batch = 1, .heads_q = heads_q, .heads_kv = heads_kv});
      change(c, {.head_dim = 32, .seqlen_q = 5});
      run_everywhere(c);
      change(c, {.seqlen_q = 70, .causal = true, .sink = true});
      run_everywhere(c);
    }
  }
}

}  // namespace
}  // namespace tandem::harness
