// Collective operations of a warp: all 32 lanes take part, or the warp has diverged.
#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "operand.hpp"

namespace tandem::emulator {
namespace {

using Operation = Warp::Operation;

const char* name(Operation operation) {
  switch (operation) {
    case Operation::shuffle_xor: return "shuffle_xor";
    case Operation::shuffle: return "shuffle";
    case Operation::shuffle_up: return "shuffle_up";
    case Operation::ballot: return "ballot";
    case Operation::reduce_or: return "reduce_or";
    case Operation::reduce_max: return "reduce_max";
    case Operation::sync: return "sync_warp";
    case Operation::elect: return "elect_one";
    case Operation::ldmatrix: return "ldmatrix_x4";
    case Operation::ldmatrix_transposed: return "ldmatrix_x4_transposed";
    case Operation::stmatrix: return "stmatrix_x4";
    case Operation::stmatrix_transposed: return "stmatrix_x4_transposed";
    case Operation::mma: return "mma";
  }
  return "";
}

void join_lanes(Warp& warp, Thread& last) {
  for (Thread* t : warp.waiting) {
    join(last.clock, t->clock);
    join(last.peers, t->peers);
  }
  for (Thread* t : warp.waiting) {
    // What all know together is at least what each has known, of itself, too.
    t->clock = last.clock;
    t->peers = last.peers;
  }
}

/// Lane l gets columns 2 (l % 4), + 1 of row l / 4 of matrix i, whose row r is at the address of lane 8 i +
/// r; transposed, these rows of that column.
void load_matrices(std::array<Warp::Deposit, 32>& deposits, bool transposed) {
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    for (std::uint32_t i = 0; i < 4; ++i) {
      std::uint32_t& value = deposits[lane].values[i];
      for (std::uint32_t half = 0; half < 2; ++half) {
        const std::uint32_t pair = lane % 4 * 2 + half;
        const std::uint32_t row = transposed ? pair : lane / 4;
        const std::uint32_t column = transposed ? lane / 4 : pair;
        std::uint16_t element = 0;
        std::memcpy(&element, deposits[8 * i + row].row + column * 2, 2);
        value = half == 0 ? element : value | std::uint32_t{element} << 16;
      }
    }
  }
}

/// Matrix i's row r goes to the address of lane 8 i + r; lane l holds columns 2 (l % 4), + 1 of row l / 4, or
/// `transposed` rows of a column.
void store_matrices(const std::array<Warp::Deposit, 32>& deposits, bool transposed) {
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    for (std::uint32_t i = 0; i < 4; ++i) {
      for (std::uint32_t e = 0; e < 2; ++e) {
        const std::uint32_t pair = lane % 4 * 2 + e;
        const std::uint32_t row = transposed ? pair : lane / 4;
        const std::uint32_t col = transposed ? lane / 4 : pair;
        const auto element = static_cast<std::uint16_t>(deposits[lane].values[i] >> (16 * e));
        std::memcpy(deposits[8 * i + row].row + 2 * col, &element, 2);
      }
    }
  }
}

/// Hands in `mine`, waits for the other lanes, and returns what all have handed in.
const std::array<Warp::Deposit, 32>& collective(Operation operation, std::uint32_t argument,
                                                const Warp::Deposit& mine) {
  Block& block = Block::current();
  Thread& self = block.self();
  Warp& warp = block.warps[self.index / 32];
  count(&Work::exchanges);
  if (warp.arrived == 0) {
    warp.operation = operation;
    warp.argument = argument;
    warp.first = self.index;
  } else if (warp.operation != operation || warp.argument != argument) {
    block.fail(fmt::format("warp {} has diverged: lane {} executes {}({}) and lane {} {}({})",
                           self.index / 32, self.index % 32, name(operation), argument, warp.first % 32,
                           name(warp.operation), warp.argument));
  }
  auto& deposits = warp.deposits[warp.generation % 2];
  deposits[self.index % 32] = mine;
  if (++warp.arrived < 32) {
    warp.waiting.push_back(&self);
    block.suspend({Wait::Kind::warp, self.index / 32, warp.generation});
    return deposits;
  }
  if (operation == Operation::sync) join_lanes(warp, self);
  if (operation == Operation::ldmatrix || operation == Operation::ldmatrix_transposed)
    load_matrices(deposits, operation == Operation::ldmatrix_transposed);
  if (operation == Operation::stmatrix || operation == Operation::stmatrix_transposed)
    store_matrices(deposits, operation == Operation::stmatrix_transposed);
  if (operation == Operation::mma) multiply_fragments(static_cast<Element>(argument), deposits);
  warp.arrived = 0;
  ++warp.generation;
  block.wake_all(warp.waiting);
  return deposits;
}

}  // namespace

std::uint32_t shuffle_xor(std::uint32_t value, int mask) {
  const std::uint32_t lane = thread_index() % 32;
  const auto& all = collective(Operation::shuffle_xor, static_cast<std::uint32_t>(mask), {{value}, nullptr});
  return all[(lane ^ static_cast<std::uint32_t>(mask)) % 32].values[0];
}

float shuffle_xor(float value, int mask) {
  check_register(value);
  return std::bit_cast<float>(shuffle_xor(std::bit_cast<std::uint32_t>(value), mask));
}

std::uint32_t shuffle(std::uint32_t value, int lane) {
  return collective(Operation::shuffle, 0, {{value}, nullptr})[static_cast<std::uint32_t>(lane) % 32]
      .values[0];
}

std::uint32_t shuffle_up(std::uint32_t value, int delta) {
  const std::uint32_t lane = thread_index() % 32;
  const auto& all = collective(Operation::shuffle_up, static_cast<std::uint32_t>(delta), {{value}, nullptr});
  return lane >= static_cast<std::uint32_t>(delta) ? all[lane - static_cast<std::uint32_t>(delta)].values[0]
                                                   : value;
}

std::uint32_t ballot(bool predicate) {
  const auto& all = collective(Operation::ballot, 0, {{predicate ? 1U : 0U}, nullptr});
  std::uint32_t bits = 0;
  for (std::uint32_t lane = 0; lane < 32; ++lane) bits |= all[lane].values[0] << lane;
  return bits;
}

std::uint32_t reduce_or(std::uint32_t value) {
  const auto& all = collective(Operation::reduce_or, 0, {{value}, nullptr});
  std::uint32_t bits = 0;
  for (std::uint32_t lane = 0; lane < 32; ++lane) bits |= all[lane].values[0];
  return bits;
}

std::uint32_t reduce_max(std::uint32_t value) {
  const auto& all = collective(Operation::reduce_max, 0, {{value}, nullptr});
  std::uint32_t largest = 0;
  for (std::uint32_t lane = 0; lane < 32; ++lane) largest = std::max(largest, all[lane].values[0]);
  return largest;
}

void sync_warp() {
  collective(Operation::sync, 0, {});
  Block::current().tick();
}

bool elect_one() {
  collective(Operation::elect, 0, {});
  return thread_index() % 32 == Block::current().elected_lane();
}

namespace {

void load_matrices(Operation operation, const void* row, std::uint32_t (&d)[4]) {
  Block& block = Block::current();
  const std::uint32_t offset = block.shared_offset(row, 16, name(operation));
  if (offset % 16 != 0)
    block.fail(fmt::format("{} at +{}: a row is not aligned to 16 bytes", name(operation), offset));
  check_shared_read(row, 16);
  const std::uint32_t lane = thread_index() % 32;
  const auto& all = collective(operation, 0, {{}, const_cast<char*>(static_cast<const char*>(row))});
  std::copy_n(all[lane].values, 4, d);
}

}  // namespace

void ldmatrix_x4(const void* row, std::uint32_t (&d)[4]) {
  load_matrices(Operation::ldmatrix, row, d);
}

void ldmatrix_x4_transposed(const void* row, std::uint32_t (&d)[4]) {
  load_matrices(Operation::ldmatrix_transposed, row, d);
}

void mma(Element element, float* d, const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  collective(Operation::mma, static_cast<std::uint32_t>(element),
             {{a[0], a[1], a[2], a[3], b0, b1}, reinterpret_cast<char*>(d)});
}

namespace {

void store_matrices(Operation operation, void* row, const Warp::Deposit& mine) {
  Block& block = Block::current();
  const std::uint32_t offset = block.shared_offset(row, 16, name(operation));
  if (offset % 16 != 0)
    block.fail(fmt::format("{} at +{}: a row is not aligned to 16 bytes", name(operation), offset));
  check_shared_write(row, 16);
  collective(operation, 0, mine);
}

}  // namespace

void stmatrix_x4(void* row, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  store_matrices(Operation::stmatrix, row, {{a, b, c, d}, static_cast<char*>(row)});
}

void stmatrix_x4_transposed(void* row, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  store_matrices(Operation::stmatrix_transposed, row, {{a, b, c, d}, static_cast<char*>(row)});
}

}  // namespace tandem::emulator
