// TMA: boxes of tensors between global and shared memory, some time after they were asked for.
#include <fmt/format.h>

#include <algorithm>

#include "block.hpp"
#include "swizzle.hpp"

namespace tandem::emulator {
namespace {

constexpr std::uint64_t magic = 0x7a6d65745f70616dULL;

/// What TensorMap's opaque bytes hold here.
struct Encoded {
  std::uint64_t magic;
  char* base;
  std::int64_t dims[5];
  std::int64_t strides[4];
  std::uint16_t box[5];
  std::uint8_t element_bytes;
  std::uint8_t rank;
  Swizzle swizzle;
};
static_assert(sizeof(Encoded) <= sizeof(TensorMap));

/// One copy: where its box lies in the tensor and in shared memory.
struct Box {
  Encoded map;
  std::uint32_t shared;  ///< offset
  std::int64_t origin[4];

  [[nodiscard]] std::uint32_t row_bytes() const { return std::uint32_t{map.box[0]} * map.element_bytes; }
  [[nodiscard]] std::uint32_t rows() const { return std::uint32_t{map.box[1]} * map.box[2] * map.box[3]; }
  [[nodiscard]] std::uint32_t bytes() const { return row_bytes() * rows(); }

  /// Elements of the box's innermost dimension inside the tensor, [first, last), and where row `row` begins:
  /// null if the whole row is outside. The pointer is that of the box's first element, which may itself be
  /// outside.
  [[nodiscard]] char* row(std::uint32_t row, std::int64_t& first, std::int64_t& last) const {
    const std::int64_t at[4] = {origin[0], origin[1] + row % map.box[1],
                                origin[2] + row / map.box[1] % map.box[2],
                                origin[3] + row / map.box[1] / map.box[2]};
    first = std::max<std::int64_t>(0, -at[0]);
    last = std::min<std::int64_t>(map.box[0], map.dims[0] - at[0]);
    if (first >= last) return nullptr;
    char* p = map.base + at[0] * map.element_bytes;
    for (std::size_t i = 1; i < 4; ++i) {
      if (at[i] < 0 || at[i] >= map.dims[i]) return nullptr;
      p += at[i] * map.strides[i - 1];
    }
    return p;
  }
  /// f(pointer, bytes) of the part of each row that is inside the tensor.
  template <typename F>
  void for_each_part(const F& f) const {
    for (std::uint32_t r = 0; r < rows(); ++r) {
      std::int64_t first = 0;
      std::int64_t last = 0;
      const char* p = row(r, first, last);
      if (p == nullptr) continue;
      f(p + first * map.element_bytes, static_cast<std::size_t>(last - first) * map.element_bytes);
    }
  }
  /// Offset in shared memory of the 16 bytes `unit` of row `row`.
  [[nodiscard]] std::uint32_t unit(std::uint32_t row, std::uint32_t unit) const {
    // Dynamic shared memory begins at a multiple of every pattern, so offsets swizzle as addresses do.
    return swizzled(shared + row * row_bytes() + unit * 16, map.swizzle);
  }
};

Box make_box(Block& block, const TensorMap& map, const void* shared, const int (&origin)[4],
             const char* what) {
  Box box{};
  std::memcpy(&box.map, &map, sizeof(box.map));
  if (box.map.magic != magic) block.fail(fmt::format("{}: not a tensor map of emulator::encode", what));
  if (box.map.rank != 4)
    block.fail(fmt::format("{}: four coordinates for a tensor map of rank {}", what, box.map.rank));
  std::copy(std::begin(origin), std::end(origin), std::begin(box.origin));
  box.shared = block.shared_offset(shared, box.bytes(), what);
  // A box of fewer than eight rows may begin inside the swizzle's pattern, which goes by addresses: pages of
  // one row passed the contract's tests on an H200.
  if (box.shared % 128 != 0 || (box.rows() >= 8 && box.shared % swizzle_pattern(box.map.swizzle) != 0)) {
    block.fail(
        fmt::format("{}: shared memory at +{} is misaligned: the swizzle's pattern repeats every {} bytes",
                    what, box.shared, swizzle_pattern(box.map.swizzle)));
  }
  if (box.origin[0] * box.map.element_bytes % 16 != 0) {
    block.fail(fmt::format(
        "{}: the innermost coordinate {} does not lead to a multiple of 16 bytes; a GPU stops with "
        "an illegal instruction",
        what, box.origin[0]));
  }
  const bool writes = what[4] != 'l';
  if (writes && std::any_of(std::begin(origin), std::end(origin), [](int at) { return at < 0; })) {
    block.fail(
        fmt::format("{}: begins at a negative coordinate; a GPU stops with an illegal instruction, "
                    "though it loads from there",
                    what));
  }
  box.for_each_part([&](const char* p, std::size_t size) { block.check_range(p, size, writes, what); });
  return box;
}

/// `to`: where the box begins, or a copy of that part of shared memory, within which the swizzle stays.
void copy_in(const Box& box, char* to) {
  for (std::uint32_t r = 0; r < box.rows(); ++r) {
    char row[128] = {};
    std::int64_t first = 0;
    std::int64_t last = 0;
    if (const char* p = box.row(r, first, last); p != nullptr) {
      const std::int64_t size = box.map.element_bytes;
      std::memcpy(row + first * size, p + first * size, static_cast<std::size_t>((last - first) * size));
    }
    for (std::uint32_t u = 0; u < box.row_bytes() / 16; ++u)
      std::memcpy(to + (box.unit(r, u) - box.shared), row + u * 16, 16);
  }
}

void copy_out(const Box& box, const char* shared, bool add) {
  for (std::uint32_t r = 0; r < box.rows(); ++r) {
    std::int64_t first = 0;
    std::int64_t last = 0;
    char* p = box.row(r, first, last);
    if (p == nullptr) continue;
    char row[128];
    for (std::uint32_t u = 0; u < box.row_bytes() / 16; ++u)
      std::memcpy(row + u * 16, shared + box.unit(r, u), 16);
    const std::int64_t size = box.map.element_bytes;
    if (!add) {
      std::memcpy(p + first * size, row + first * size, static_cast<std::size_t>((last - first) * size));
      continue;
    }
    for (std::int64_t i = first; i < last; ++i) {
      float value = 0;
      std::memcpy(&value, row + i * size, sizeof(value));
      std::atomic_ref(reinterpret_cast<float*>(p)[i]).fetch_add(value, std::memory_order_relaxed);
    }
  }
}

/// The copy's bytes have reached their barrier.
void credit(Block& block, Barrier& b, std::uint64_t issued_in, std::uint32_t bytes) {
  --b.copies;
  if (b.phase != issued_in) {
    block.fail(fmt::format(
        "wrong byte count at mbarrier +{}: a copy of {} bytes issued in phase {} arrives in phase {}: too "
        "few bytes were announced",
        b.offset, bytes, issued_in, b.phase));
  }
  b.bytes -= bytes;
  if (b.pending == 0 && b.bytes < 0) {
    block.fail(fmt::format("wrong byte count at mbarrier +{}: phase {} received {} bytes more than announced",
                           b.offset, b.phase, -b.bytes));
  }
  block.complete_phase_if_due(b);
}

/// The barrier of a copy that is about to start.
Barrier& loading_barrier(Block& block, void* bar, const char* what) {
  Barrier& b = block.barrier(bar, what);
  if (b.fenced == 0) {
    block.fail(
        fmt::format("{}: mbarrier +{} is not visible to TMA: its thread has not called "
                    "fence_mbarrier_init",
                    what, b.offset));
  }
  return b;
}

/// One of a thread's bulk stores is done.
void stored(Block& block, Thread& thread) {
  ++thread.stores_done;
  if (thread.state == Thread::State::waiting && thread.wait.kind == Wait::Kind::store &&
      thread.wait.target <= thread.stores_done) {
    block.wake(thread);
  }
}

/// Offset in shared memory of a copy without a tensor map, once its addresses and size are checked.
std::uint32_t bulk_offset(Block& block, const void* shared, const void* global, std::uint32_t bytes,
                          bool write, const char* what) {
  const std::uint32_t offset = block.shared_offset(shared, bytes, what);
  if (offset % 16 != 0 || reinterpret_cast<std::uintptr_t>(global) % 16 != 0 || bytes % 16 != 0 ||
      bytes == 0) {
    block.fail(fmt::format("{}: {} bytes between {} and shared memory at +{} are not in units of 16", what,
                           bytes, global, offset));
  }
  block.check_range(global, bytes, write, what);
  return offset;
}

void store(const TensorMap& map, const void* shared, const int (&origin)[4], bool add, const char* what) {
  Block& block = Block::current();
  Thread& self = block.self();
  const Box box = make_box(block, map, shared, origin, what);
  if (add && box.map.element_bytes != 4) block.fail(fmt::format("{}: elements are not f32", what));
  if (!add) box.for_each_part([&](const char* p, std::size_t bytes) { block.store_in_bulk(p, bytes); });
  const Event completion(block.components().storer(block.storer_of(self)), self.stores + 1);
  for (std::uint32_t r = 0; r < box.rows(); ++r) {
    std::int64_t first = 0;
    std::int64_t last = 0;
    if (box.row(r, first, last) == nullptr) continue;
    const auto begin = static_cast<std::uint32_t>(first) * box.map.element_bytes / 16;
    const auto end = (static_cast<std::uint32_t>(last) * box.map.element_bytes + 15) / 16;
    for (std::uint32_t u = begin; u < end; ++u) {
      const std::uint32_t offset = box.unit(r, u);
      block.check(block.shadow().copy_out(offset, completion, self.clock), offset, what);
    }
  }
  ++self.stores;
  record({.kind = Step::Kind::store, .number = self.stores, .amount = box.bytes()});
  block.later([&block, &self, box, add] {
    copy_out(box, block.shared(), add);
    stored(block, self);
  });
  block.maybe_yield();
}

}  // namespace

TensorMap encode(const TensorMapSpec& spec) {
  if (const char* objection = tma_objection(spec); objection != nullptr) {
    throw Fault(fmt::format("tensor map: {}", objection));
  }
  if (spec.box[0] * spec.element_bytes != bytes_of(spec.swizzle)) {
    throw Fault("tensor map: the emulator knows only boxes as wide as the swizzle");
  }
  Encoded e{};
  e.magic = magic;
  // One map serves loads and stores; which buffers may be written is checked at each store.
  e.base = static_cast<char*>(const_cast<void*>(spec.base));
  std::copy(spec.dims.begin(), spec.dims.end(), std::begin(e.dims));
  std::copy(spec.strides.begin(), spec.strides.end(), std::begin(e.strides));
  for (std::size_t i = 0; i < spec.box.size(); ++i) e.box[i] = static_cast<std::uint16_t>(spec.box[i]);
  e.element_bytes = static_cast<std::uint8_t>(spec.element_bytes);
  e.rank = static_cast<std::uint8_t>(spec.rank);
  e.swizzle = spec.swizzle;
  TensorMap map{};
  std::memcpy(&map, &e, sizeof(e));
  return map;
}

namespace {

/// `both`: into the shared memory of the other block of the cluster, too, and credited to its barrier there.
void load(void* shared, const TensorMap& map, void* bar, const int (&origin)[4], bool both,
          const char* what) {
  Block& block = Block::current();
  Thread& self = block.self();
  const Box box = make_box(block, map, shared, origin, what);
  box.for_each_part([&](const char* p, std::size_t size) { block.check_stores(p, size, what); });
  Barrier& b = loading_barrier(block, bar, what);
  const Event completion(block.components().barrier(block.barrier_index(b)),
                         static_cast<std::uint32_t>(b.phase) + 1);
  block.check(block.shadow().copy_in(box.shared, box.bytes(), completion, self.clock), box.shared, what);
  std::memset(block.shared() + box.shared, 0xff, box.bytes());
  record({.kind = Step::Kind::load, .thing = b.offset, .number = b.phase, .amount = box.bytes()});
  ++b.copies;
  if (both) {
    const std::uint32_t other = block.other_rank();
    block.reach_other();
    Message message{.kind = Message::Kind::copy,
                    .barrier = b.offset,
                    .target = box.shared,
                    .own = self.peers[other],
                    .known = Clocks(2)};
    block.later([&block, other, box, message = std::move(message)]() mutable {
      message.data.resize(box.bytes());
      copy_in(box, message.data.data());
      block.send(other, std::move(message));
    });
  }
  block.later([&block, &b, box, phase = b.phase] {
    copy_in(box, block.shared() + box.shared);
    credit(block, b, phase, box.bytes());
  });
  block.maybe_yield();
}

}  // namespace

void tma_load(void* shared, const TensorMap& map, void* bar, int c0, int c1, int c2, int c3) {
  load(shared, map, bar, {c0, c1, c2, c3}, false, "tma_load");
}

void tma_load_both(void* shared, const TensorMap& map, void* bar, int c0, int c1, int c2, int c3) {
  Block::current().cluster();
  load(shared, map, bar, {c0, c1, c2, c3}, true, "tma_load_both");
}

void bulk_load(void* shared, const void* global, std::uint32_t bytes, void* bar) {
  Block& block = Block::current();
  Thread& self = block.self();
  const std::uint32_t offset = bulk_offset(block, shared, global, bytes, false, "bulk_load");
  block.check_stores(global, bytes, "bulk_load");
  Barrier& b = loading_barrier(block, bar, "bulk_load");
  const Event completion(block.components().barrier(block.barrier_index(b)),
                         static_cast<std::uint32_t>(b.phase) + 1);
  block.check(block.shadow().copy_in(offset, bytes, completion, self.clock), offset, "bulk_load");
  std::memset(block.shared() + offset, 0xff, bytes);
  record({.kind = Step::Kind::load, .thing = b.offset, .number = b.phase, .amount = bytes});
  ++b.copies;
  block.later([&block, &b, offset, global, bytes, phase = b.phase] {
    std::memcpy(block.shared() + offset, global, bytes);
    credit(block, b, phase, bytes);
  });
  block.maybe_yield();
}

namespace {

/// From shared to global memory, by `write(target, value)` for each f32.
template <typename Write>
void bulk_out(float* global, const void* shared, std::uint32_t bytes, const char* what, Write write) {
  Block& block = Block::current();
  Thread& self = block.self();
  const std::uint32_t offset = bulk_offset(block, shared, global, bytes, true, what);
  const Event completion(block.components().storer(block.storer_of(self)), self.stores + 1);
  for (std::uint32_t at = offset; at < offset + bytes; at += 16) {
    block.check(block.shadow().copy_out(at, completion, self.clock), at, what);
  }
  ++self.stores;
  record({.kind = Step::Kind::store, .number = self.stores, .amount = bytes});
  block.later([&block, &self, offset, global, bytes, write] {
    for (std::uint32_t i = 0; i < bytes / 4; ++i) {
      float value = 0;
      std::memcpy(&value, block.shared() + offset + i * 4, sizeof(value));
      write(std::atomic_ref(global[i]), value);
    }
    stored(block, self);
  });
  block.maybe_yield();
}

}  // namespace

void bulk_store(void* global, const void* shared, std::uint32_t bytes) {
  Block::current().store_in_bulk(global, bytes);
  bulk_out(
      static_cast<float*>(global), shared, bytes, "bulk_store",
      [](std::atomic_ref<float> target, float value) { target.store(value, std::memory_order_relaxed); });
}

void bulk_reduce_add(float* global, const void* shared, std::uint32_t bytes) {
  bulk_out(global, shared, bytes, "bulk_reduce_add", [](std::atomic_ref<float> target, float value) {
    target.fetch_add(value, std::memory_order_relaxed);
  });
}

void tma_store(const TensorMap& map, const void* shared, int c0, int c1, int c2, int c3) {
  store(map, shared, {c0, c1, c2, c3}, false, "tma_store");
}

void tma_reduce_add(const TensorMap& map, const void* shared, int c0, int c1, int c2, int c3) {
  store(map, shared, {c0, c1, c2, c3}, true, "tma_reduce_add");
}

void tma_store_commit() {
  Thread& self = Block::current().self();
  self.store_groups.push_back(self.stores);
  self.stores_committed = self.stores;
}

namespace {

/// Waits until at most `pending` groups are left, and returns how many stores have then been done (0: nothing
/// was waited for).
std::uint32_t wait_for_stores(int pending) {
  Block& block = Block::current();
  Thread& self = block.self();
  std::uint32_t target = 0;
  while (self.store_groups.size() > static_cast<std::size_t>(pending)) {
    target = self.store_groups.front();
    self.store_groups.erase(self.store_groups.begin());
  }
  if (target == 0) return 0;
  record({.kind = Step::Kind::wait_stores, .number = target});
  if (self.stores_done < target) block.suspend({Wait::Kind::store, 0, target});
  self.clock[block.components().storer(self.storer)] = target;
  return target;
}

}  // namespace

void tma_store_wait(int pending) {
  wait_for_stores(pending);
}

void tma_store_wait_written(int pending) {
  Thread& self = Block::current().self();
  const std::uint32_t done = wait_for_stores(pending);
  // A wait for reading may have come before, so that nothing was left to wait for.
  self.stores_written = std::max(self.stores_written, pending == 0 ? self.stores_committed : done);
}

}  // namespace tandem::emulator
