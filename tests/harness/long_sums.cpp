#include "long_sums.hpp"
#include "changes.hpp"

namespace tandem::harness {
namespace {

constexpr std::int64_t head_dim = 8;

/// One head of `head_dim` channels, all 0 but for what `set` gives rows.
Call zero_call(DType dtype, std::int64_t rows, std::int64_t keys) {
  Case c = with({}, {.dtype = dtype, .head_dim = head_dim, .seqlen_q = rows, .seqlen_k = keys});
  c.options.scale = 1.0F;
  Call call(c);
  for (Box* box : {&call.q, &call.k, &call.v, &call.dout}) {
    for (std::int64_t n = 0; n < box->numel(); ++n) box->set(n, 0.0);
  }
  return call;
}

}  // namespace

Call many_keys(DType dtype, std::int64_t rows, std::int64_t keys, bool raised) {
  Call call = zero_call(dtype, rows, keys);
  for (std::int64_t i = 0; i < rows; ++i) {
    call.q.set(i * head_dim, 1.0);
    call.dout.set(i * head_dim, 0.9);
    call.dout.set(i * head_dim + 1, 1.3);
  }
  for (std::int64_t j = 0; j < keys; ++j) {
    const double side = j % 2 == 0 ? 1.0 : -1.0;
    call.k.set(j * head_dim + 1, 0.7 * side);
    call.v.set(j * head_dim, 3.3);
    call.v.set(j * head_dim + 1, 1.1 * side);
  }
  if (raised) call.k.set(0, 0.125);
  return call;
}

Call many_queries(DType dtype, std::int64_t rows) {
  Call call = zero_call(dtype, rows, 2);
  const double size = 1024.0 / static_cast<double>(rows);  // f16 has room for the sums
  for (std::int64_t i = 0; i < rows; ++i) {
    call.q.set(i * head_dim, 0.7);
    call.dout.set(i * head_dim, 0.9 * size);
    call.dout.set(i * head_dim + 1, 1.3 * size);
  }
  for (std::int64_t j = 0; j < 2; ++j) {
    call.k.set(j * head_dim + 1, 0.7);
    call.v.set(j * head_dim, 3.3);
    call.v.set(j * head_dim + 1, j == 0 ? 1.1 : -1.1);
  }
  return call;
}

}  // namespace tandem::harness
