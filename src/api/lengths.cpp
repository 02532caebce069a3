#include "api/lengths.hpp"

#include "api/check.hpp"

namespace tandem::check {
namespace {

void offsets(const char* name, const Lengths& cu_seqlens, std::int64_t batch, std::int64_t rows,
             const char* rows_name) {
  if (!cu_seqlens.given()) return;
  if (cu_seqlens[0] != 0) invalid("{}[0] is {}; the first sequence starts at row 0", name, cu_seqlens[0]);
  for (std::int64_t b = 1; b <= batch; ++b) {
    if (cu_seqlens[b] < cu_seqlens[b - 1]) {
      invalid("{}[{}] is {}, below {}[{}] = {}; offsets must ascend", name, b, cu_seqlens[b], name, b - 1,
              cu_seqlens[b - 1]);
    }
    if (cu_seqlens[b] > rows) {
      invalid("{}[{}] is {}; offsets are at most {} = {}", name, b, cu_seqlens[b], rows_name, rows);
    }
  }
}

void used(const char* name, const Lengths& seqused, const Lengths& cu_seqlens, std::int64_t batch,
          std::int64_t rows) {
  if (!seqused.given()) return;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = cu_seqlens.given() ? cu_seqlens[b + 1] - cu_seqlens[b] : rows;
    if (seqused[b] < 0 || seqused[b] > length) {
      invalid("{}[{}] is {}; it must be from 0 to the length of sequence {}, {}", name, b, seqused[b], b,
              length);
    }
  }
}

}  // namespace

void lengths_contents(const Problem& p) {
  offsets("cu_seqlens_q", p.cu_seqlens_q, p.batch, p.rows_q, "total_q");
  offsets("cu_seqlens_k", p.cu_seqlens_k, p.batch, p.rows_k, "total_k");
  used("seqused_q", p.seqused_q, p.cu_seqlens_q, p.batch, p.rows_q);
  used("seqused_k", p.seqused_k, p.cu_seqlens_k, p.batch, p.rows_k);
}

}  // namespace tandem::check
