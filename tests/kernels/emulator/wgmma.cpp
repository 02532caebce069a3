// The tensor cores: warpgroup matrix products out of swizzled shared memory, some time after they were
// issued.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "block.hpp"
#include "problem/recipe.hpp"
#include "swizzle.hpp"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define TANDEM_EMULATOR_VECTOR __attribute__((target_clones("avx2", "default")))
#else
#define TANDEM_EMULATOR_VECTOR
#endif

namespace tandem::emulator {
namespace {

constexpr int depth = 16;              ///< K of one instruction
constexpr int byte_depth = 2 * depth;  ///< in 8 bits: as many bytes
constexpr std::uint32_t threads = 128;

/// A descriptor's fields, in bytes; `start` is an offset in dynamic shared memory.
struct Operand {
  std::uint32_t start;
  std::uint32_t leading;
  std::uint32_t stride;
  Swizzle swizzle;

  /// Offset of the 16 bytes that hold elements 8 `unit` to 8 `unit` + 7 of row `row` (K-major).
  [[nodiscard]] std::uint32_t k_major(std::uint32_t row, std::uint32_t unit) const {
    return swizzled(start + row / 8 * stride + row % 8 * swizzle_span(swizzle) + unit * 16, swizzle);
  }
  /// Offset of the 16 bytes that hold columns 8 `unit` to 8 `unit` + 7 of row `k` (MN-major).
  [[nodiscard]] std::uint32_t mn_major(std::uint32_t k, std::uint32_t unit) const {
    const std::uint32_t strip = swizzle_span(swizzle) / 16;
    return swizzled(
        start + unit / strip * leading + unit % strip * 16 + k / 8 * stride + k % 8 * swizzle_span(swizzle),
        swizzle);
  }
};

Operand decode(Block& block, std::uint64_t bits, bool mn_major, const char* what) {
  constexpr std::uint32_t field = 0x3fff;
  const std::uint32_t mode = static_cast<std::uint32_t>(bits >> 62);
  if (mode == 0) block.fail(fmt::format("{}: a descriptor without swizzle", what));
  Operand o{.start = (static_cast<std::uint32_t>(bits) & field) * 16 - shared_window,
            .leading = (static_cast<std::uint32_t>(bits >> 16) & field) * 16,
            .stride = (static_cast<std::uint32_t>(bits >> 32) & field) * 16,
            .swizzle = mode == 1   ? Swizzle::b128
                       : mode == 2 ? Swizzle::b64
                                   : Swizzle::b32};
  const std::uint32_t span = swizzle_span(o.swizzle);
  const std::uint32_t in_pattern = o.start % swizzle_pattern(o.swizzle);
  if (mn_major ? in_pattern != 0 : in_pattern + 2 * depth > span) {
    block.fail(fmt::format("{}: misaligned descriptor: start +{} is {} bytes into a pattern of {}", what,
                           o.start, in_pattern, swizzle_pattern(o.swizzle)));
  }
  return o;
}

/// Calls visit(offset, row or k, unit) for each 16 bytes of an operand of `extent` rows or columns.
template <typename Visit>
void for_each_unit(const Operand& o, bool mn_major, std::uint32_t extent, const Visit& visit) {
  if (mn_major) {
    for (std::uint32_t k = 0; k < depth; ++k) {
      for (std::uint32_t u = 0; u < extent / 8; ++u) visit(o.mn_major(k, u), k, u);
    }
  } else {
    for (std::uint32_t row = 0; row < extent; ++row) {
      for (std::uint32_t u = 0; u < 2; ++u) visit(o.k_major(row, u), row, u);
    }
  }
}

float from_f16(std::uint32_t h) {
  const std::uint32_t sign = (h & 0x8000) << 16;
  const std::uint32_t exponent = h >> 10 & 31;
  const std::uint32_t mantissa = h & 0x3ff;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) return std::copysign(static_cast<float>(mantissa) * 0x1p-24F, sign != 0 ? -1.0F : 1.0F);
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

float to_float(std::uint32_t bits, Element element) {
  static const std::vector<float> f16 = [] {
    std::vector<float> table(1U << 16);
    for (std::uint32_t i = 0; i < table.size(); ++i) table[i] = from_f16(i);
    return table;
  }();
  return element == Element::bf16 ? std::bit_cast<float>(bits << 16) : f16[bits];
}

void load_unit(const char* p, Element element, float (&values)[8]) {
  std::uint16_t raw[8];
  std::memcpy(raw, p, sizeof(raw));
  for (int i = 0; i < 8; ++i) values[i] = to_float(raw[i], element);
}

/// c (64 x n) += a (64 x depth) b (depth x n), in blocks of 8 x 8 sums that stay in registers.
TANDEM_EMULATOR_VECTOR void multiply(const float (*a)[depth], const float* b, float* c, int n) {
  using Vector = float __attribute__((vector_size(32)));
  constexpr int rows = 8;
  for (int j = 0; j < n; j += 8) {
    Vector columns[depth];
    for (int k = 0; k < depth; ++k) std::memcpy(&columns[k], b + k * n + j, sizeof(Vector));
    for (int m = 0; m < 64; m += rows) {
      Vector sums[rows];
      for (int r = 0; r < rows; ++r) std::memcpy(&sums[r], c + (m + r) * n + j, sizeof(Vector));
      for (int k = 0; k < depth; ++k) {
        for (int r = 0; r < rows; ++r) sums[r] += a[m + r][k] * columns[k];
      }
      for (int r = 0; r < rows; ++r) std::memcpy(c + (m + r) * n + j, &sums[r], sizeof(Vector));
    }
  }
}

/// Operands in 8 bits: all of A, and B as columns.
struct ByteOperands {
  std::uint8_t a[64][byte_depth];
  std::vector<std::uint8_t> b;  ///< [n][byte_depth]
};

/// c += a b in f32; the accumulator then keeps 13 bits behind the point (kernels/config/recipe.hpp).
void multiply_e4m3(const ByteOperands& x, std::vector<float>& c, std::uint32_t n) {
  static const std::vector<float> values = [] {
    std::vector<float> table(256);
    for (std::uint32_t i = 0; i < table.size(); ++i) table[i] = unpack_e4m3(i);
    return table;
  }();
  std::vector<float> b(static_cast<std::size_t>(byte_depth) * n);  // [k][n]
  for (std::uint32_t j = 0; j < n; ++j) {
    for (std::uint32_t k = 0; k < byte_depth; ++k) b[k * n + j] = values[x.b[j * byte_depth + k]];
  }
  for (std::uint32_t m = 0; m < 64; ++m) {
    float* const sums = c.data() + static_cast<std::size_t>(m) * n;
    for (std::uint32_t k = 0; k < byte_depth; ++k) {
      const float a = values[x.a[m][k]];
      for (std::uint32_t j = 0; j < n; ++j) sums[j] += a * b[k * n + j];
    }
    for (std::uint32_t j = 0; j < n; ++j) {
      const bool nan = sums[j] != sums[j];
      if (!nan) sums[j] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(sums[j]) & e4m3_accumulator_mask);
    }
  }
}

/// c += a b in s32, whose bits lie in c.
std::int32_t integer(std::uint8_t byte, bool is_signed) {
  return is_signed ? static_cast<std::int8_t>(byte) : static_cast<std::int32_t>(byte);
}
void multiply_integers(const ByteOperands& x, MatrixType type, std::vector<float>& c, std::uint32_t n) {
  const bool a_signed = type == MatrixType::s8;
  const bool b_signed = type != MatrixType::u8_u8;
  for (std::uint32_t m = 0; m < 64; ++m) {
    std::int32_t a[byte_depth];
    for (int k = 0; k < byte_depth; ++k) a[k] = integer(x.a[m][k], a_signed);
    for (std::uint32_t j = 0; j < n; ++j) {
      std::int32_t sum = 0;
      for (int k = 0; k < byte_depth; ++k)
        sum += a[k] * integer(x.b[j * byte_depth + static_cast<std::uint32_t>(k)], b_signed);
      std::int32_t held;
      std::memcpy(&held, &c[m * n + j], sizeof(held));
      held += sum;
      std::memcpy(&c[m * n + j], &held, sizeof(held));
    }
  }
}

/// Row and column of a thread's accumulator register `r` (wgmma.cuh).
std::uint32_t register_row(std::uint32_t thread, std::uint32_t r) {
  return 16 * (thread / 32) + thread % 32 / 4 + 8 * (r / 2 % 2);
}
std::uint32_t register_column(std::uint32_t thread, std::uint32_t r) {
  return 8 * (r / 4) + 2 * (thread % 4) + r % 2;
}

void execute_bytes(Block& block, const MatrixInstruction& m) {
  ByteOperands x;
  const auto n = static_cast<std::uint32_t>(m.n);
  x.b.resize(static_cast<std::size_t>(n) * byte_depth);
  if (m.a_in_registers) {
    for (std::uint32_t t = 0; t < threads; ++t) {
      for (std::uint32_t r = 0; r < 4; ++r) {
        const std::uint32_t row = 16 * (t / 32) + t % 32 / 4 + 8 * (r % 2);
        std::memcpy(&x.a[row][16 * (r / 2) + 4 * (t % 4)], &m.a_registers[t * 4 + r], 4);
      }
    }
  } else {
    for_each_unit(decode(block, m.a, false, "wgmma"), false, 64,
                  [&](std::uint32_t offset, std::uint32_t row, std::uint32_t u) {
                    std::memcpy(&x.a[row][16 * u], block.shared() + offset, 16);
                  });
  }
  for_each_unit(decode(block, m.b, false, "wgmma"), false, n,
                [&](std::uint32_t offset, std::uint32_t row, std::uint32_t u) {
                  std::memcpy(&x.b[row * byte_depth + 16 * u], block.shared() + offset, 16);
                });
  std::vector<float>& c = m.accumulator->values;
  if (!m.accumulate) std::fill(c.begin(), c.end(), 0.0F);
  if (m.type == MatrixType::e4m3) {
    multiply_e4m3(x, c, n);
  } else {
    multiply_integers(x, m.type, c, n);
  }
}

void execute(Block& block, const MatrixInstruction& m) {
  if (m.type >= MatrixType::e4m3) {
    execute_bytes(block, m);
    return;
  }
  const auto element = static_cast<Element>(m.type);
  float a[64][depth];
  std::vector<float> b(static_cast<std::size_t>(depth * m.n));
  const auto n = static_cast<std::uint32_t>(m.n);
  if (m.a_in_registers) {
    for (std::uint32_t t = 0; t < threads; ++t) {
      for (std::uint32_t r = 0; r < 4; ++r) {
        const std::uint32_t row = 16 * (t / 32) + t % 32 / 4 + 8 * (r % 2);
        const std::uint32_t column = 8 * (r / 2) + 2 * (t % 4);
        const std::uint32_t packed = m.a_registers[t * 4 + r];
        a[row][column] = to_float(packed & 0xffff, element);
        a[row][column + 1] = to_float(packed >> 16, element);
      }
    }
  } else {
    for_each_unit(decode(block, m.a, m.a_mn_major, "wgmma"), m.a_mn_major, 64,
                  [&](std::uint32_t offset, std::uint32_t line, std::uint32_t u) {
                    float values[8];
                    load_unit(block.shared() + offset, element, values);
                    for (std::uint32_t i = 0; i < 8; ++i) {
                      (m.a_mn_major ? a[8 * u + i][line] : a[line][8 * u + i]) = values[i];
                    }
                  });
  }
  for_each_unit(decode(block, m.b, m.b_mn_major, "wgmma"), m.b_mn_major, n,
                [&](std::uint32_t offset, std::uint32_t line, std::uint32_t u) {
                  float values[8];
                  load_unit(block.shared() + offset, element, values);
                  for (std::uint32_t i = 0; i < 8; ++i) {
                    if (m.b_mn_major) {
                      b[line * n + 8 * u + i] = values[i];
                    } else {
                      b[(8 * u + i) * n + line] = values[i];
                    }
                  }
                });
  std::vector<float>& c = m.accumulator->values;
  if (!m.accumulate) std::fill(c.begin(), c.end(), 0.0F);
  multiply(a, b.data(), c.data(), m.n);
}

void execute_next(Block& block, std::uint32_t index) {
  Warpgroup& group = block.warpgroups[index];
  execute(block, *group.find(group.executed + 1));
  ++group.executed;
  std::vector<Thread*> still_waiting;
  for (Thread* t : group.waiting) {
    if (t->wait.target <= group.executed) {
      block.wake(*t);
    } else {
      still_waiting.push_back(t);
    }
  }
  group.waiting = std::move(still_waiting);
}

/// Marks what a new instruction reads of shared memory, and notes who wrote it.
void reserve_operand(Block& block, MatrixInstruction& m, std::uint32_t index, std::uint64_t descriptor,
                     bool mn_major, std::uint32_t extent) {
  const Operand o = decode(block, descriptor, mn_major, "wgmma");
  for_each_unit(o, mn_major, extent, [&](std::uint32_t offset, std::uint32_t, std::uint32_t) {
    block.shared_offset(block.shared() + static_cast<std::int32_t>(offset), 16, "wgmma operand");
    block.shadow().matrix_read(offset, index, m.number, m.sources);
  });
}

/// The calling thread's share of its next WGMMA.
void issue(float* d, int n, MatrixType type, const std::uint32_t* a_registers, std::uint64_t a,
           std::uint64_t b, bool a_mn_major, bool b_mn_major, bool accumulate) {
  Block& block = Block::current();
  Thread& self = block.self();
  const std::uint32_t index = self.index / threads;
  const std::uint32_t rank = self.index % threads;
  Warpgroup& group = block.warpgroups[index];
  MatrixThread& mine = self.matrix;
  const std::uint32_t number = ++mine.issued;

  const auto open =
      std::find_if(mine.open.begin(), mine.open.end(), [&](const auto& o) { return o.registers == d; });
  MatrixInstruction* m = group.find(number);
  if (m == nullptr) {
    m = &group.instructions.emplace_back();
    *m = {.number = number,
          .n = n,
          .type = type,
          .a_in_registers = a_registers != nullptr,
          .a = a,
          .b = b,
          .a_mn_major = a_mn_major,
          .b_mn_major = b_mn_major,
          .accumulate = accumulate,
          .opens = open == mine.open.end()};
    m->first_thread = self.index;
    m->waits = mine.waits;
    if (m->opens) {
      m->accumulator = std::make_shared<Accumulator>();
      m->accumulator->n = n;
      m->accumulator->values.resize(static_cast<std::size_t>(64 * n));
    } else {
      m->accumulator = open->accumulator;
    }
    if (m->a_in_registers) {
      m->a_registers.resize(4 * threads);
    } else {
      reserve_operand(block, *m, index, a, a_mn_major, 64);
    }
    reserve_operand(block, *m, index, b, b_mn_major, static_cast<std::uint32_t>(n));
  }
  if (m->n != n || m->type != type || m->a != a || m->b != b || m->a_mn_major != a_mn_major ||
      m->b_mn_major != b_mn_major || m->accumulate != accumulate ||
      m->a_in_registers != (a_registers != nullptr)) {
    block.fail(fmt::format(
        "wgmma: differs from WGMMA {} of its warpgroup as thread {} issued it: a {:#x} / {:#x}, b {:#x} / "
        "{:#x}, n {} / {}, accumulate {} / {}",
        number, m->first_thread, a, m->a, b, m->b, n, m->n, accumulate, m->accumulate));
  }
  if (m->waits != mine.waits) {
    block.fail(
        fmt::format("wgmma: this warp has waited {} times before WGMMA {}, thread {} {} times: a wait "
                    "must not stand in a branch that a warp takes alone",
                    mine.waits, number, m->first_thread, m->waits));
  }
  if (m->opens != (open == mine.open.end()) || (!m->opens && open->accumulator != m->accumulator)) {
    block.fail(fmt::format("wgmma: WGMMA {} uses other accumulators here than in thread {}", number,
                           m->first_thread));
  }
  if (!mine.fenced && (m->opens || m->a_in_registers)) {
    block.fail("wgmma: no wgmma_fence between its registers' last use and this WGMMA");
  }
  if (m->accumulator->n != n) {
    block.fail(
        fmt::format("wgmma: n = {} on accumulators that a WGMMA of n = {} still owns", n, m->accumulator->n));
  }
  for (const auto& [event, offset] : m->sources) {
    block.check(block.shadow().async_visible(event, self.clock), offset, "wgmma operand");
  }

  const auto registers = static_cast<std::uint32_t>(n / 2);
  if (m->opens) {
    for (std::uint32_t r = 0; r < registers; ++r) {
      if (accumulate) {
        check_register(d[r]);
        m->accumulator
            ->values[register_row(rank, r) * static_cast<std::uint32_t>(n) + register_column(rank, r)] = d[r];
      }
      std::memcpy(&d[r], &poison, sizeof(poison));
    }
    mine.open.push_back({d, m->accumulator, number});
  } else {
    open->last = number;
  }
  if (m->a_in_registers) {
    for (std::uint32_t r = 0; r < 4; ++r) {
      check_register(std::bit_cast<float>(a_registers[r]));
      m->a_registers[rank * 4 + r] = a_registers[r];
    }
    mine.operands.push_back({a_registers, number});
  }
  if (++m->issued == threads) block.later([&block, index] { execute_next(block, index); });
}

/// Hands accumulators back to the thread and checks that it left its registers alone.
void retire(Block& block, Thread& self, std::uint32_t target) {
  MatrixThread& mine = self.matrix;
  const std::uint32_t rank = self.index % threads;
  Warpgroup& group = block.warpgroups[self.index / threads];
  std::erase_if(mine.operands, [&](const MatrixThread::Operand& o) {
    if (o.instruction > target) return false;
    const MatrixInstruction& m = *group.find(o.instruction);
    if (std::memcmp(o.registers, &m.a_registers[rank * 4], 16) != 0) {
      block.fail(fmt::format("changed the A registers of WGMMA {} before wgmma_wait", o.instruction));
    }
    return true;
  });
  std::erase_if(mine.open, [&](const MatrixThread::Open& o) {
    if (o.last > target) return false;
    const Accumulator& c = *o.accumulator;
    for (std::uint32_t r = 0; r < static_cast<std::uint32_t>(c.n / 2); ++r) {
      if (std::memcmp(&o.registers[r], &poison, sizeof(poison)) != 0) {
        block.fail(fmt::format("wrote accumulator register {} of WGMMA {} before wgmma_wait", r, o.last));
      }
      std::memcpy(
          &o.registers[r],
          &c.values[register_row(rank, r) * static_cast<std::uint32_t>(c.n) + register_column(rank, r)],
          sizeof(float));
    }
    return true;
  });
  for (std::uint32_t i = mine.retired + 1; i <= target; ++i) ++group.find(i)->retired;
  while (!group.instructions.empty() && group.instructions.front().retired == threads)
    group.instructions.pop_front();
  mine.retired = target;
  std::uint32_t& known = self.clock[block.components().warpgroup(self.index / threads)];
  known = std::max(known, target);
}

}  // namespace

MatrixInstruction* Warpgroup::find(std::uint32_t number) {
  if (instructions.empty() || number < instructions.front().number) return nullptr;
  const std::size_t i = number - instructions.front().number;
  return i < instructions.size() ? &instructions[i] : nullptr;
}

float unpack(std::uint32_t bits, Element element) {
  return to_float(bits, element);
}

std::uint32_t add_zero_times(std::uint32_t sum, std::uint32_t x, Element element) {
  const auto finite = [element](std::uint32_t bits) {
    return std::isfinite(to_float(bits & 0xffff, element));
  };
  const std::uint32_t low = finite(sum) && finite(x) ? 0 : 0x7fff;
  const std::uint32_t high = finite(sum >> 16) && finite(x >> 16) ? 0 : 0x7fff0000;
  return high | low;
}

void check_descriptor(const void* shared, std::uint32_t leading, std::uint32_t stride, Swizzle /*swizzle*/) {
  Block& block = Block::current();
  const std::uint32_t offset = block.shared_offset(shared, 16, "matrix_descriptor");
  if (offset % 16 != 0 || (leading % 16 != 0 && leading != 1) || stride % 16 != 0) {
    block.fail(fmt::format("matrix_descriptor: misaligned: start +{}, leading {}, stride {}", offset, leading,
                           stride));
  }
  constexpr std::uint32_t limit = 1U << 18;
  if (leading >= limit || stride >= limit) {
    block.fail(
        fmt::format("matrix_descriptor: leading {} or stride {} has more than 18 bits", leading, stride));
  }
}

void wgmma_fence() {
  Block::current().self().matrix.fenced = true;
}

void wgmma_commit() {
  MatrixThread& mine = Block::current().self().matrix;
  mine.groups.push_back(mine.issued);
}

void wgmma_wait(int pending) {
  Block& block = Block::current();
  Thread& self = block.self();
  MatrixThread& mine = self.matrix;
  mine.fenced = false;
  ++mine.waits;
  std::uint32_t target = mine.retired;
  while (mine.groups.size() > static_cast<std::size_t>(pending)) {
    target = mine.groups.front();
    mine.groups.pop_front();
  }
  const std::uint32_t index = self.index / threads;
  Warpgroup& group = block.warpgroups[index];
  if (group.executed < target) {
    group.waiting.push_back(&self);
    block.suspend({Wait::Kind::matrix, index, target});
  }
  if (target != mine.retired) retire(block, self, target);
}

void wgmma_shared(float* d, int n, Element element, std::uint64_t a, std::uint64_t b, bool a_mn_major,
                  bool b_mn_major, bool accumulate) {
  issue(d, n, matrix_type(element), nullptr, a, b, a_mn_major, b_mn_major, accumulate);
}

void wgmma_registers(float* d, int n, Element element, const std::uint32_t* a, std::uint64_t b,
                     bool b_mn_major, bool accumulate) {
  issue(d, n, matrix_type(element), a, 0, b, false, b_mn_major, accumulate);
}

// Sums in s32 lie in their registers as bits, like f32.
void wgmma_bytes_shared(void* d, int n, Bytes bytes, std::uint64_t a, std::uint64_t b, bool accumulate) {
  issue(static_cast<float*>(d), n, matrix_type(bytes), nullptr, a, b, false, false, accumulate);
}

void wgmma_bytes_registers(void* d, int n, Bytes bytes, const std::uint32_t* a, std::uint64_t b,
                           bool accumulate) {
  issue(static_cast<float*>(d), n, matrix_type(bytes), a, 0, b, false, false, accumulate);
}

}  // namespace tandem::emulator
