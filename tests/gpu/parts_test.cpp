// forward_part and backward_part on a GPU against the fp64 oracle of the whole sequence. Skipped, with the
// reason, where there is none.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "gpu/device.hpp"
#include "gpu_cases.hpp"
#include "harness/element.hpp"
#include "harness/expect.hpp"
#include "tandem/cache.hpp"
#include "tandem/parts.hpp"

namespace tandem::gpu {
namespace {

using harness::Box;
using harness::Call;
using harness::Case;

constexpr Device device{.kind = Device::Kind::cuda, .index = 0};

class GpuParts : public GpuTest {};

/// A contiguous tensor on the device, and its elements here.
struct OnDevice {
  DeviceBuffer memory;
  Tensor view;

  /// The elements of a box, or NaN in the shape of a tensor.
  explicit OnDevice(const Box& box) : OnDevice(box.view(), box.dtype()) {
    const std::vector<std::byte> raw = box.raw();
    memory.copy_from_host(raw.data(), raw.size());
    synchronize(0);
  }
  OnDevice(const Tensor& like, DType dtype)
      : memory(0, static_cast<std::size_t>(like.numel()) * size_of(dtype)) {
    view = Tensor(memory.data(), dtype, {like.shape[0], like.shape[1], like.shape[2], like.shape[3]}, device);
    view.rank = like.rank;
    std::int64_t step = 1;
    for (int i = view.rank; i-- > 0; step *= view.shape[static_cast<std::size_t>(i)]) {
      view.stride[static_cast<std::size_t>(i)] = step;
    }
    memory.fill(0xFF);  // NaN in every dtype
    synchronize(0);
  }
  void copy_to(Box& box) const {
    std::vector<std::byte> raw(memory.bytes());
    memory.copy_to_host(raw.data(), raw.size());
    synchronize(0);
    for (std::int64_t n = 0; n < box.numel(); ++n) box.set(n, harness::decode(view.dtype, raw.data(), n));
  }
};

template <typename View>
View slice(View t, const Piece& piece, std::size_t dim = 1) {
  t.data = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(t.data))) +
           piece.first * t.stride[dim] * static_cast<std::int64_t>(size_of(t.dtype));
  t.shape[dim] = piece.count;
  return t;
}

Case case_of_parts(DType dtype, bool causal, std::int64_t left) {
  Case c = small_case(dtype, 700, 700);
  c.heads_q = 4;
  c.heads_kv = 2;
  c.head_dim_qk = c.head_dim_v = 128;
  c.options.causal = causal;
  c.options.window_left = left;
  c.options.deterministic = true;
  c.lse = true;
  return c;
}

/// Uneven, so that a piece of queries and one of keys begin at other places.
const std::vector<Piece> query_pieces{{0, 130}, {130, 300}, {430, 270}};
const std::vector<Piece> key_pieces{{200, 500}, {0, 77}, {77, 123}};

struct Sequence {
  Call call;
  OnDevice q, k, v, out, lse, dout;

  explicit Sequence(const Case& c)
      : call(c),
        q(call.q),
        k(call.k),
        v(call.v),
        out(call.out.view(), DType::f32),
        lse(call.lse.view(), DType::f32),
        dout(call.dout) {}

  PartInputs inputs(const Piece& queries, const Piece& keys) const {
    PartInputs in;
    in.q = slice(q.view, queries);
    in.k = slice(k.view, keys);
    in.v = slice(v.view, keys);
    in.first_query = queries.first;
    in.first_key = keys.first;
    in.options.causal = call.spec.options.causal;
    in.options.window_left = call.spec.options.window_left;
    in.options.deterministic = true;
    return in;
  }

  void forward(bool workspace) {
    const Stream stream(0);
    for (const Piece& queries : query_pieces) {
      bool accumulate = false;
      for (const Piece& keys : key_pieces) {
        ForwardPartArgs args;
        static_cast<PartInputs&>(args) = inputs(queries, keys);
        args.out = slice(out.view, queries);
        args.lse = slice(lse.view, queries, 2);
        args.accumulate = accumulate;
        Execution execution{.stream = stream.get()};
        const std::size_t bytes = workspace_bytes(args, execution);
        DeviceBuffer memory;
        if (workspace && bytes > 0) {
          memory = DeviceBuffer(0, bytes);
          execution.workspace = memory.data();
          execution.workspace_bytes = bytes;
        }
        forward_part(args, execution);
        stream.synchronize();
        accumulate = true;
      }
    }
  }
};

const std::vector<Case> cases{case_of_parts(DType::bf16, false, -1), case_of_parts(DType::bf16, true, -1),
                              case_of_parts(DType::f16, true, 150)};

TEST_F(GpuParts, OfQueriesAndKeysGiveOneForward) {
  for (const Case& c : cases) {
    SCOPED_TRACE(c.describe());
    Sequence s(c);
    const harness::Expected expected = harness::expect(s.call, Pass::forward);
    for (const bool workspace : {false, true}) {
      s.out.memory.fill(0xFF);
      s.lse.memory.fill(0xFF);
      synchronize(0);
      s.forward(workspace);
      const Tensor& t = s.call.out.view();
      Box out(DType::f32, {t.shape[0], t.shape[1], t.shape[2], t.shape[3]}, {}, true);
      s.out.copy_to(out);
      s.lse.copy_to(s.call.lse);
      EXPECT_TRUE(harness::matches("out", out, expected.out));
      EXPECT_TRUE(harness::matches("lse", s.call.lse, expected.lse));
    }
  }
}

/// Parts of a gradient, each rounded to 16 bits, added up.
struct Sum {
  std::vector<double> sums, sizes;
  explicit Sum(const Box& box) : sums(static_cast<std::size_t>(box.numel())), sizes(sums.size()) {}

  /// Rows `piece` of the tensor, (batch 1, rows, heads, head_dim).
  void add(const OnDevice& part, const Piece& piece) {
    Box rows(part.view.dtype, {1, part.view.shape[1], part.view.shape[2], part.view.shape[3]}, {}, true);
    part.copy_to(rows);
    const std::int64_t first = piece.first * part.view.shape[2] * part.view.shape[3];
    for (std::int64_t n = 0; n < rows.numel(); ++n) {
      sums[static_cast<std::size_t>(first + n)] += rows.get(n);
      sizes[static_cast<std::size_t>(first + n)] += std::abs(rows.get(n));
    }
  }

  /// Within the bound of one call, and what rounding each part adds: half a unit in the last of 8 bits (bf16;
  /// f16 has 11).
  void expect(const char* name, const harness::Target& target) const {
    for (std::size_t n = 0; n < sums.size(); ++n) {
      const double bound = target.bound.at(target.values[n]) + sizes[n] / 256;
      ASSERT_LE(std::abs(sums[n] - target.values[n]), bound) << name << ", element " << n;
    }
  }
};

TEST_F(GpuParts, OfQueriesAndKeysAddUpToOneBackward) {
  for (const Case& c : cases) {
    SCOPED_TRACE(c.describe());
    Sequence s(c);
    const harness::Expected expected = harness::expect(s.call, Pass::backward);
    s.forward(false);
    const OnDevice rounded(s.call.out.view(), c.dtype), lse(s.call.lse.view(), DType::f32);
    const ConstTensor out = s.out.view, out_lse = s.lse.view;
    merge({.outs = {&out, 1}, .lses = {&out_lse, 1}, .out = rounded.view, .lse = lse.view});
    Sum dq(s.call.dq), dk(s.call.dk), dv(s.call.dv);
    for (const Piece& queries : query_pieces) {
      for (const Piece& keys : key_pieces) {
        BackwardPartArgs args;
        static_cast<PartInputs&>(args) = s.inputs(queries, keys);
        args.out = slice(rounded.view, queries);
        args.lse = slice(lse.view, queries, 2);
        args.dout = slice(s.dout.view, queries);
        const OnDevice of_q(slice(s.q.view, queries), c.dtype), of_k(slice(s.k.view, keys), c.dtype),
            of_v(slice(s.v.view, keys), c.dtype);
        args.dq = of_q.view;
        args.dk = of_k.view;
        args.dv = of_v.view;
        args.accumulate = false;
        backward_part(args);
        dq.add(of_q, queries);
        dk.add(of_k, keys);
        dv.add(of_v, keys);
      }
    }
    dq.expect("dq", expected.dq);
    dk.expect("dk", expected.dk);
    dv.expect("dv", expected.dv);
  }
}

}  // namespace
}  // namespace tandem::gpu
