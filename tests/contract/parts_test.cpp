// Contract line 20 for forward_part and backward_part: pieces of queries and of keys, in f32, are one call.
#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "contract/contract.hpp"
#include "tandem/cache.hpp"
#include "tandem/parts.hpp"

namespace tandem::harness {
namespace {

struct Pieces {
  std::vector<Piece> queries;
  std::vector<Piece> keys;
};

/// Everything in one; uneven pieces in any order; an empty one; many of a few rows each.
std::vector<Pieces> divisions(std::int64_t rows) {
  std::vector<Piece> small;
  for (std::int64_t i = 0; i < rows; i += 9) small.push_back({i, std::min<std::int64_t>(9, rows - i)});
  const std::vector<Piece> uneven{{70, rows - 70}, {0, 13}, {13, 57}}, all{{0, rows}};
  const std::vector<Piece> with_empty{{0, 40}, {40, 0}, {40, rows - 40}};
  return {{all, all}, {all, uneven}, {uneven, all}, {uneven, with_empty}, {with_empty, small}};
}

struct Masked {
  bool causal = false;
  std::int64_t left = -1, right = -1;
};

/// Attention of as many queries as keys, and the results of parts, which are in f32.
struct Sequence {
  static constexpr std::int64_t rows = 101;
  Call call;
  Box out, dq, dk, dv;
  PartOptions options;

  Sequence(DType dtype, const Masked& mask) : call(spec(dtype, mask)) {
    Layout padded;
    padded.pad = 5;
    for (const auto& [to, like] :
         {std::pair{&out, &call.out}, {&dq, &call.dq}, {&dk, &call.dk}, {&dv, &call.dv}}) {
      const Tensor& t = like->view();
      *to = Box(DType::f32, {t.shape[0], t.shape[1], t.shape[2], t.shape[3]}, padded, true);
    }
    options.causal = mask.causal;
    options.window_left = mask.left;
    options.window_right = mask.right;
    options.softcap = call.spec.options.softcap;
    options.deterministic = true;
  }

  static Case spec(DType dtype, const Masked& mask) {
    Case c = plain_case(dtype);
    c.seqlen_q = c.seqlen_k = rows;
    c.head_dim_v = 40;
    c.dlse = true;
    c.options.causal = mask.causal;
    c.options.window_left = mask.left;
    c.options.window_right = mask.right;
    c.options.softcap = 2.0F;
    c.options.deterministic = true;
    return c;
  }
};

template <typename View>
View slice(View t, const Piece& piece, std::size_t dim = 1) {
  const auto bytes = piece.first * t.stride[dim] * static_cast<std::int64_t>(size_of(t.dtype));
  using Byte = std::conditional_t<std::is_same_v<View, Tensor>, std::byte, const std::byte>;
  t.data = static_cast<Byte*>(t.data) + bytes;
  t.shape[dim] = piece.count;
  return t;
}

PartInputs inputs(const Sequence& s, const Piece& queries, const Piece& keys) {
  PartInputs in;
  in.q = slice<ConstTensor>(s.call.q.view(), queries);
  in.k = slice<ConstTensor>(s.call.k.view(), keys);
  in.v = slice<ConstTensor>(s.call.v.view(), keys);
  in.first_query = queries.first;
  in.first_key = keys.first;
  in.options = s.options;
  return in;
}

/// Runs with a workspace of the size asked for, or without one.
template <typename Args, typename Run>
void with_workspace(const Args& args, bool given, Run&& run) {
  Execution execution{.threads = 1};
  GuardedBytes memory(std::max<std::size_t>(1, workspace_bytes(args, execution)));
  if (given) {
    execution.workspace = memory.data();
    execution.workspace_bytes = workspace_bytes(args, execution);
  }
  run(args, execution);
}

void forward_in(Sequence& s, const Pieces& pieces, bool workspace) {
  s.out.poison();
  s.call.lse.poison();
  for (const Piece& queries : pieces.queries) {
    bool first = true;
    for (const Piece& keys : pieces.keys) {
      ForwardPartArgs args;
      static_cast<PartInputs&>(args) = inputs(s, queries, keys);
      args.out = slice(s.out.view(), queries);
      args.lse = slice(s.call.lse.view(), queries, 2);
      args.accumulate = !first;
      with_workspace(args, workspace, [](const auto& a, const Execution& e) { forward_part(a, e); });
      first = false;
    }
  }
}

void backward_in(Sequence& s, const Pieces& pieces, bool workspace) {
  for (Box* box : {&s.dq, &s.dk, &s.dv}) box->poison();
  for (std::size_t i = 0; i < pieces.queries.size(); ++i) {
    for (std::size_t j = 0; j < pieces.keys.size(); ++j) {
      const Piece &queries = pieces.queries[i], &keys = pieces.keys[j];
      BackwardPartArgs args;
      static_cast<PartInputs&>(args) = inputs(s, queries, keys);
      args.out = slice<ConstTensor>(s.call.out.view(), queries);
      args.lse = slice<ConstTensor>(s.call.lse.view(), queries, 2);
      args.dout = slice<ConstTensor>(s.call.dout.view(), queries);
      args.dlse = slice<ConstTensor>(s.call.dlse.view(), queries, 2);
      const auto run = [&](bool accumulate, bool of_queries) {
        args.accumulate = accumulate;
        args.dq = of_queries ? slice(s.dq.view(), queries) : Tensor{};
        args.dk = of_queries ? Tensor{} : slice(s.dk.view(), keys);
        args.dv = of_queries ? Tensor{} : slice(s.dv.view(), keys);
        with_workspace(args, workspace, [](const auto& a, const Execution& e) { backward_part(a, e); });
      };
      run(j > 0, true);  // the first part of a row writes it
      run(i > 0, false);
    }
  }
}

const std::vector<Masked> masks{
    {}, {.causal = true}, {.causal = true, .left = 30}, {.left = 12, .right = 25}};

TEST(Contract20_Parts, OfQueriesAndKeysGiveOneCall) {
  for (const DType dtype : float_dtypes) {
    for (const Masked& mask : masks) {
      Sequence s(dtype, mask);
      SCOPED_TRACE(s.call.spec.describe());
      const Expected forward_expected = expect(s.call, Pass::forward);
      const Expected backward_expected = expect(s.call, Pass::backward);
      bool workspace = false;
      for (const Pieces& pieces : divisions(Sequence::rows)) {
        SCOPED_TRACE(testing::Message()
                     << pieces.queries.size() << " by " << pieces.keys.size() << " pieces");
        forward_in(s, pieces, workspace);
        EXPECT_TRUE(matches("out", s.out, forward_expected.out));
        EXPECT_TRUE(matches("lse", s.call.lse, forward_expected.lse));
        for (std::int64_t n = 0; n < s.out.numel(); ++n) s.call.out.set(n, s.out.get(n));
        backward_in(s, pieces, workspace);
        EXPECT_TRUE(matches("dq", s.dq, backward_expected.dq));
        EXPECT_TRUE(matches("dk", s.dk, backward_expected.dk));
        EXPECT_TRUE(matches("dv", s.dv, backward_expected.dv));
        workspace = !workspace;
      }
    }
  }
}

/// Pieces that see nothing of each other: written, they are as without keys; added, they change no bit.
TEST(Contract20_Parts, WithoutAVisiblePairIsEmpty) {
  Sequence s(DType::bf16, {.causal = true});
  const Pieces apart{{{0, 30}}, {{40, 50}}};
  forward_in(s, apart, false);
  for (std::int64_t row = 0; row < 30; ++row) {
    EXPECT_EQ(s.out.get(row * 4 * 40), 0.0);
    EXPECT_EQ(s.call.lse.get(row), -std::numeric_limits<double>::infinity());
  }
  backward_in(s, apart, false);
  EXPECT_EQ(s.dq.get(29 * 4 * 64), 0.0);
  EXPECT_EQ(s.dk.get(40 * 2 * 64), 0.0);
  EXPECT_EQ(s.dv.get(89 * 2 * 40), 0.0);
  const Pieces all{{{0, Sequence::rows}}, {{0, Sequence::rows}}};
  forward_in(s, all, false);
  const auto out = s.out.raw(), lse = s.call.lse.raw();
  ForwardPartArgs args;
  static_cast<PartInputs&>(args) = inputs(s, apart.queries[0], apart.keys[0]);
  args.out = slice(s.out.view(), apart.queries[0]);
  args.lse = slice(s.call.lse.view(), apart.queries[0], 2);
  forward_part(args);
  EXPECT_TRUE(same_bits(s.out.raw(), out));
  EXPECT_TRUE(same_bits(s.call.lse.raw(), lse));
}

/// What the header says of a sink: one more part, whose out is 0 and whose lse is the sink.
TEST(Contract20_Parts, ASinkJoinsByMerge) {
  Case c = Sequence::spec(DType::f32, {.causal = true});
  c.sink = true;
  Call call(c);
  const Expected expected = expect(call, Pass::forward);
  Sequence s(DType::f32, {.causal = true});
  forward_in(s, {{{0, 60}, {60, 41}}, {{0, 101}}}, false);
  const Box zeros = [&] {
    Box box(DType::f32, {2, 101, 4, 40}, {}, false);
    for (std::int64_t n = 0; n < box.numel(); ++n) box.set(n, 0.0);
    return box;
  }();
  ConstTensor sinks(call.sink.view().data, DType::f32, {2, 4, 101});
  sinks.stride = {0, call.sink.view().stride[0], 0};
  const std::vector<ConstTensor> outs{s.out.view(), zeros.view()}, lses{s.call.lse.view(), sinks};
  call.prepare(Pass::forward);
  merge({.outs = outs, .lses = lses, .out = call.out.view(), .lse = call.lse.view()});
  EXPECT_TRUE(matches("out", call.out, expected.out));
  EXPECT_TRUE(matches("lse", call.lse, expected.lse));
}

}  // namespace
}  // namespace tandem::harness
