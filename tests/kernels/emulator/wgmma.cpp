// WGMMA as threads issue it and wait for it: products are computed some time after all threads have issued
// them.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "operand.hpp"

namespace tandem::emulator {
namespace {

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

/// What a thread asks for; all threads of a warpgroup must ask for the same.
struct Request {
  int n;
  MatrixType type;
  bool a_in_registers;
  std::uint64_t a, b;
  bool a_mn_major, b_mn_major;
  bool accumulate;
};

/// WGMMA `number` of the warpgroup, as its first thread issues it. `accumulator` is null where the registers
/// are not those of an open one.
MatrixInstruction* begin(Block& block, Thread& self, std::uint32_t number, const Request& r,
                         const std::shared_ptr<Accumulator>& accumulator) {
  const std::uint32_t index = self.index / matrix_threads;
  MatrixInstruction* m = &block.warpgroups[index].instructions.emplace_back();
  *m = {.number = number,
        .n = r.n,
        .type = r.type,
        .a_in_registers = r.a_in_registers,
        .a = r.a,
        .b = r.b,
        .a_mn_major = r.a_mn_major,
        .b_mn_major = r.b_mn_major,
        .accumulate = r.accumulate,
        .opens = accumulator == nullptr};
  m->first_thread = self.index;
  m->waits = self.matrix.waits;
  m->accumulator = accumulator;
  if (m->opens) {
    m->accumulator = std::make_shared<Accumulator>();
    m->accumulator->n = r.n;
    m->accumulator->values.resize(static_cast<std::size_t>(64 * r.n));
  }
  if (m->a_in_registers) {
    m->a_registers.resize(4 * matrix_threads);
  } else {
    reserve_operand(block, *m, index, r.a, r.a_mn_major, 64);
  }
  reserve_operand(block, *m, index, r.b, r.b_mn_major, static_cast<std::uint32_t>(r.n));
  return m;
}

/// Fails where a thread's WGMMA differs from its warpgroup's, or touches registers that are in use.
void check(Block& block, const MatrixThread& mine, const MatrixInstruction& m, const Request& r,
           const std::shared_ptr<Accumulator>& accumulator) {
  if (m.n != r.n || m.type != r.type || m.a != r.a || m.b != r.b || m.a_mn_major != r.a_mn_major ||
      m.b_mn_major != r.b_mn_major || m.accumulate != r.accumulate || m.a_in_registers != r.a_in_registers) {
    block.fail(fmt::format(
        "wgmma: differs from WGMMA {} of its warpgroup as thread {} issued it: a {:#x} / {:#x}, b {:#x} / "
        "{:#x}, n {} / {}, accumulate {} / {}",
        m.number, m.first_thread, r.a, m.a, r.b, m.b, r.n, m.n, r.accumulate, m.accumulate));
  }
  if (m.waits != mine.waits) {
    block.fail(
        fmt::format("wgmma: this warp has waited {} times before WGMMA {}, thread {} {} times: a wait "
                    "must not stand in a branch that a warp takes alone",
                    mine.waits, m.number, m.first_thread, m.waits));
  }
  if (m.opens != (accumulator == nullptr) || (!m.opens && accumulator != m.accumulator)) {
    block.fail(fmt::format("wgmma: WGMMA {} uses other accumulators here than in thread {}", m.number,
                           m.first_thread));
  }
  if (!mine.fenced && (m.opens || m.a_in_registers)) {
    block.fail("wgmma: no wgmma_fence between its registers' last use and this WGMMA");
  }
  if (m.accumulator->n != r.n) {
    block.fail(fmt::format("wgmma: n = {} on accumulators that a WGMMA of n = {} still owns", r.n,
                           m.accumulator->n));
  }
}

/// The calling thread's share of its next WGMMA.
void issue(float* d, int n, MatrixType type, const std::uint32_t* a_registers, std::uint64_t a,
           std::uint64_t b, bool a_mn_major, bool b_mn_major, bool accumulate) {
  Block& block = Block::current();
  Thread& self = block.self();
  const std::uint32_t index = self.index / matrix_threads;
  const std::uint32_t rank = self.index % matrix_threads;
  MatrixThread& mine = self.matrix;
  const std::uint32_t number = ++mine.issued;
  const Request request{n, type, a_registers != nullptr, a, b, a_mn_major, b_mn_major, accumulate};

  const auto open =
      std::find_if(mine.open.begin(), mine.open.end(), [&](const auto& o) { return o.registers == d; });
  const std::shared_ptr<Accumulator> accumulator = open == mine.open.end() ? nullptr : open->accumulator;
  MatrixInstruction* m = block.warpgroups[index].find(number);
  if (m == nullptr) m = begin(block, self, number, request, accumulator);
  check(block, mine, *m, request, accumulator);
  for (const auto& [event, offset] : m->sources) {
    if (!block.shadow().async_sees(event, self.clock))
      block.check(block.shadow().async_fault(event, self.clock), offset, "wgmma operand");
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
  const std::uint32_t bits = type == MatrixType::f16 || type == MatrixType::bf16 ? 16 : 8;
  record({.kind = Step::Kind::issue_product,
          .registers = a_registers != nullptr,
          .thing = bits,
          .number = number,
          .amount = std::uint64_t{2} * 64 * static_cast<std::uint64_t>(n) * (256 / bits)});
  if (++m->issued == matrix_threads) block.later([&block, index] { execute_next(block, index); });
}

/// Hands accumulators back to the thread and checks that it left its registers alone.
void retire(Block& block, Thread& self, std::uint32_t target) {
  MatrixThread& mine = self.matrix;
  const std::uint32_t rank = self.index % matrix_threads;
  Warpgroup& group = block.warpgroups[self.index / matrix_threads];
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
  while (!group.instructions.empty() && group.instructions.front().retired == matrix_threads)
    group.instructions.pop_front();
  mine.retired = target;
  std::uint32_t& known = self.clock[block.components().warpgroup(self.index / matrix_threads)];
  known = std::max(known, target);
}

}  // namespace

MatrixInstruction* Warpgroup::find(std::uint32_t number) {
  if (instructions.empty() || number < instructions.front().number) return nullptr;
  const std::size_t i = number - instructions.front().number;
  return i < instructions.size() ? &instructions[i] : nullptr;
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
    mine.groups.erase(mine.groups.begin());
  }
  const std::uint32_t index = self.index / matrix_threads;
  Warpgroup& group = block.warpgroups[index];
  if (target != mine.retired) record({.kind = Step::Kind::wait_products, .number = target});
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
