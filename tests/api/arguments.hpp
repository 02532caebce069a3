// Arguments for the tests of checks, plans and explanations: legal ones, to be broken one at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "tandem/attention.hpp"

namespace tandem::test {

/// A contiguous tensor in 64 KiB of zeroed memory of its own (`slot`: 0 to 31).
inline Tensor tensor(std::size_t slot, DType dtype, std::initializer_list<std::int64_t> shape) {
  alignas(256) static std::array<std::byte, std::size_t{32} << 16> memory;
  return {memory.data() + (slot << 16), dtype, shape};
}

/// batch 2, seqlen_q 5, seqlen_k 7, heads_q 4, heads_kv 2, head_dim 16, head_dim_v 8, f32, with lse.
inline ForwardArgs dense_forward() {
  ForwardArgs a;
  a.q = tensor(0, DType::f32, {2, 5, 4, 16});
  a.k = tensor(1, DType::f32, {2, 7, 2, 16});
  a.v = tensor(2, DType::f32, {2, 7, 2, 8});
  a.out = tensor(3, DType::f32, {2, 5, 4, 8});
  a.lse = tensor(4, DType::f32, {2, 4, 5});
  return a;
}

/// The same in e4m3 with bf16 out.
inline ForwardArgs e4m3_forward() {
  ForwardArgs a = dense_forward();
  a.q = tensor(0, DType::e4m3, {2, 5, 4, 16});
  a.k = tensor(1, DType::e4m3, {2, 7, 2, 16});
  a.v = tensor(2, DType::e4m3, {2, 7, 2, 8});
  a.out = tensor(3, DType::bf16, {2, 5, 4, 8});
  return a;
}

/// The same on a cache: two pages a sequence, of four rows.
inline ForwardArgs e4m3_paged_forward() {
  ForwardArgs a = e4m3_forward();
  a.k = tensor(1, DType::e4m3, {6, 4, 2, 16});
  a.v = tensor(2, DType::e4m3, {6, 4, 2, 8});
  a.page_table = tensor(13, DType::i32, {2, 2});
  return a;
}

/// Two sequences, 3 + 2 queries and 4 + 3 keys, packed; i32 offsets; all else as dense_forward.
inline ForwardArgs packed_forward() {
  ForwardArgs a;
  a.q = tensor(0, DType::f32, {5, 4, 16});
  a.k = tensor(1, DType::f32, {7, 2, 16});
  a.v = tensor(2, DType::f32, {7, 2, 8});
  a.out = tensor(3, DType::f32, {5, 4, 8});
  a.lse = tensor(4, DType::f32, {4, 5});
  static std::array<std::int32_t, 3> offsets_q{0, 3, 5};
  static std::array<std::int32_t, 3> offsets_k{0, 4, 7};
  a.cu_seqlens_q = Tensor(offsets_q.data(), DType::i32, {3});
  a.cu_seqlens_k = Tensor(offsets_k.data(), DType::i32, {3});
  return a;
}

/// The backward pass of dense_forward, with a sink and every optional gradient.
inline BackwardArgs dense_backward() {
  BackwardArgs a;
  static_cast<AttentionInputs&>(a) = dense_forward();
  a.sink = tensor(5, DType::f32, {4});
  a.out = tensor(3, DType::f32, {2, 5, 4, 8});
  a.lse = tensor(4, DType::f32, {2, 4, 5});
  a.dout = tensor(6, DType::f32, {2, 5, 4, 8});
  a.dlse = tensor(7, DType::f32, {2, 4, 5});
  a.dq = tensor(8, DType::f32, {2, 5, 4, 16});
  a.dk = tensor(9, DType::f32, {2, 7, 2, 16});
  a.dv = tensor(10, DType::f32, {2, 7, 2, 8});
  a.dsink = tensor(11, DType::f32, {4});
  return a;
}

}  // namespace tandem::test
