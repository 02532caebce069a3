#include "api/lengths.hpp"

#include <array>
#include <vector>

#include "api/check.hpp"
#include "gpu/lengths.hpp"

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

void host_contents(const Problem& p) {
  offsets("cu_seqlens_q", p.cu_seqlens_q, p.batch, p.rows_q, "total_q");
  offsets("cu_seqlens_k", p.cu_seqlens_k, p.batch, p.rows_k, "total_k");
  used("seqused_q", p.seqused_q, p.cu_seqlens_q, p.batch, p.rows_q);
  used("seqused_k", p.seqused_k, p.cu_seqlens_k, p.batch, p.rows_k);
}

}  // namespace

void lengths_contents(const Problem& p) {
  if (p.device.kind == Device::Kind::cpu) {
    host_contents(p);
    return;
  }
  Problem copied = p;
  std::array<std::vector<std::int64_t>, 4> values;
  const std::array<Lengths*, 4> all = {&copied.cu_seqlens_q, &copied.cu_seqlens_k, &copied.seqused_q,
                                       &copied.seqused_k};
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!all[i]->given()) continue;
    values[i] = gpu::read_lengths(*all[i], i < 2 ? p.batch + 1 : p.batch, p.device.index);
    *all[i] = {.data = values[i].data(), .wide = true, .stride = 1};
  }
  host_contents(copied);
}

}  // namespace tandem::check
