#include "cpu/add.hpp"

#include "cpu/cpu.hpp"
#include "cpu/operand.hpp"

namespace tandem::cpu {

void add(const AddedRows& shape, const Operand& to, const Operand& from, int wanted_threads) {
  const int threads = usable_threads(wanted_threads);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t n = 0; n < shape.batch * shape.rows; ++n) {
    for (std::int64_t head = 0; head < shape.heads; ++head) {
      auto* const sum = reinterpret_cast<float*>(element(to, n / shape.rows, n % shape.rows, head));
      const auto* const part =
          reinterpret_cast<const float*>(element(from, n / shape.rows, n % shape.rows, head));
      for (std::int64_t c = 0; c < shape.columns; ++c) sum[c] += part[c];
    }
  }
}

}  // namespace tandem::cpu
