#include "block.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

namespace tandem::emulator {
namespace {

constexpr std::size_t shared_limit =
    228 * 1024;  // of an SM; a kilobyte of it is the system's, for each block
constexpr int register_file = 64 * 1024;

/// Registers a thread starts with: its share of the file, rounded down as the hardware allots them.
int initial_registers(const Grid& grid) {
  return std::min(register_file / static_cast<int>(grid.threads * grid.blocks_per_sm) / 8 * 8, 248);
}

}  // namespace

std::string thread_name(std::uint32_t thread) {
  return fmt::format("thread {} (warpgroup {}, warp {}, lane {})", thread, thread / 128, thread / 32,
                     thread % 32);
}

Block::Block(std::uint32_t index, const Grid& grid, const Options& options,
             const std::function<void()>& kernel, Stacks& stacks, char* shared, Cluster* cluster,
             BlockStores& stores)
    : index_(index),
      grid_(grid),
      options_(options),
      kernel_(kernel),
      components_{grid.threads},
      shadow_(static_cast<std::uint32_t>(grid.shared_bytes), components_),
      stores_(stores),
      shared_(shared),
      cluster_(cluster),
      random_state_((options.seed + 1) * 0x9e3779b97f4a7c15ULL + index) {
  if (options.seed != 0) elected_lane_ = random(32);
  std::memset(shared_, 0xff, grid.shared_bytes);  // NaN in every floating-point type
  warps.resize(grid.threads / 32);
  warpgroups.resize((grid.threads + 127) / 128);
  barriers_.reserve(max_barriers);
  threads_.resize(grid.threads);
  for (std::uint32_t t = 0; t < grid.threads; ++t) {
    Thread& thread = threads_[t];
    thread.index = t;
    thread.clock.resize(components_.count());
    thread.clock[t] = 1;
    if (cluster != nullptr) thread.peers = peer_clocks();
    thread.registers = initial_registers(grid);
    prepare(thread.context, stacks.bottom(t), &Block::thread_main);
    ready_.push_back(&thread);
  }
  if (options.recording != nullptr && options.recording->block == index) prepare_recording();
}

void Block::prepare_recording() {
  if (options_.seed != 0 || cluster_ != nullptr)
    fail("a recording takes seed 0, which elects lane 0, and no cluster");
  options_.recording->warps.assign(warps.size(), {});
  tallies_.resize(warps.size());
  for (std::size_t w = 0; w < warps.size(); ++w) {
    tallies_[w].steps = &options_.recording->warps[w];
    threads_[32 * w].tally = &tallies_[w];
  }
}

constinit thread_local Block* Block::current_ = nullptr;

void Block::no_current() {
  throw Fault("a device function was called outside emulator::launch");
}

void Block::thread_main() {
  Block& block = *current_;
  Thread& self = *block.running_;
  finish_switch(self.context, block.scheduler_);
  try {
    block.kernel_();
  } catch (...) {
    block.failure_ = std::current_exception();
  }
  self.state = Thread::State::finished;
  switch_context(self.context, block.scheduler_, true);
  std::abort();  // a finished thread is not resumed
}

std::uint32_t Block::random(std::uint32_t bound) {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return static_cast<std::uint32_t>((random_state_ >> 32) * bound >> 32);
}

Thread& Block::next_thread() {
  if (options_.seed != 0)
    std::swap(ready_.front(), ready_[random(static_cast<std::uint32_t>(ready_.size()))]);
  Thread& thread = *ready_.front();
  ready_.pop_front();
  return thread;
}

void Block::resume(Thread& thread) {
  running_ = &thread;
  tally = thread.tally;
  switch_context(scheduler_, thread.context);
  tally = nullptr;
  running_ = nullptr;
}

void Block::later(std::function<void()> action) {
  const std::uint32_t delay = options_.max_delay == 0 ? 0 : random(options_.max_delay);
  actions_.emplace(step_ + delay, std::move(action));
}

void Block::run_due_actions() {
  while (!actions_.empty() && (ready_.empty() || actions_.begin()->first <= step_)) {
    const std::function<void()> action = std::move(actions_.begin()->second);
    actions_.erase(actions_.begin());
    action();
  }
}

void Block::run() {
  current_ = this;
  while (finished_ < threads_.size()) {
    ++step_;
    run_due_actions();
    receive();
    while (ready_.empty() && cluster_ != nullptr && cluster_->wait(rank())) receive();
    if (ready_.empty()) report_deadlock();
    Thread& thread = next_thread();
    resume(thread);
    if (failure_) std::rethrow_exception(failure_);
    if (thread.state == Thread::State::finished) ++finished_;
  }
  if (cluster_ != nullptr) leave_cluster();
  check_finished();
}

void Block::suspend(Wait wait) {
  Thread& thread = self();
  thread.state = Thread::State::waiting;
  thread.wait = wait;
  switch_context(thread.context, scheduler_);
}

void Block::wake(Thread& thread) {
  thread.state = Thread::State::ready;
  thread.wait = {};
  ready_.push_back(&thread);
}

void Block::wake_all(std::vector<Thread*>& threads) {
  for (Thread* t : threads) wake(*t);
  threads.clear();
}

void Block::maybe_yield() {
  if (options_.seed != 0 && random(4) == 0) yield();
}

void Block::yield() {
  Thread& thread = self();
  ready_.push_back(&thread);
  switch_context(thread.context, scheduler_);
}

void Block::tick() {
  Thread& thread = self();
  if (++thread.clock[thread.index] == Event::clock_limit)
    fail("ran for longer than the emulator's clocks can count");
}

std::uint32_t Block::shared_offset(const void* p, std::size_t bytes, const char* what) {
  const std::ptrdiff_t offset = static_cast<const char*>(p) - shared_;
  if (offset < 0 || static_cast<std::size_t>(offset) + bytes > grid_.shared_bytes) {
    fail(fmt::format("{}: {} bytes at +{} are outside shared memory ({} bytes)", what, bytes, offset,
                     grid_.shared_bytes));
  }
  return static_cast<std::uint32_t>(offset);
}

void Block::fail(const Thread& who, const std::string& what) {
  throw Fault(fmt::format("block {}, {}: {}", index_, thread_name(who.index), what));
}

void Block::fail(const std::string& what) {
  if (running_ == nullptr) throw Fault(fmt::format("block {}: {}", index_, what));
  fail(*running_, what);
}

void Block::check(const std::string& wrong, std::uint32_t offset, const char* what) {
  if (!wrong.empty()) fail(fmt::format("{} at +{}: {}", what, offset, wrong));
}

std::string Block::describe(const Thread& thread) const {
  const Wait& w = thread.wait;
  switch (w.kind) {
    case Wait::Kind::barrier: {
      const Barrier& b = barriers_[w.thing];
      return fmt::format(
          "waits at mbarrier +{} for phase {} (parity {}): {} of {} arrivals and {} bytes are missing, {} "
          "copies in flight",
          b.offset, w.target, w.target % 2, b.pending, b.arrivals, b.bytes, b.copies);
    }
    case Wait::Kind::named_barrier: {
      const NamedBarrier& b = named_barriers[w.thing];
      return fmt::format("waits at named barrier {}: {} of {} threads have arrived", w.thing, b.arrived,
                         b.expected);
    }
    case Wait::Kind::warp:
      return fmt::format("waits for the rest of warp {}: {} of 32 lanes have arrived", w.thing,
                         warps[w.thing].arrived);
    case Wait::Kind::matrix: {
      const Warpgroup& g = warpgroups[w.thing];
      std::string text = fmt::format("waits in wgmma_wait for WGMMA {} of warpgroup {}", w.target, w.thing);
      for (const MatrixInstruction& m : g.instructions) {
        if (m.issued != 128) {
          text += fmt::format("; WGMMA {} was issued by {} of 128 threads", m.number, m.issued);
          break;
        }
      }
      return text;
    }
    case Wait::Kind::store: return fmt::format("waits in tma_store_wait for store {}", w.target);
    case Wait::Kind::cluster: return "waits for the threads of the cluster";
    case Wait::Kind::none: break;
  }
  return "runs";
}

void Block::report_deadlock() {
  std::string text = fmt::format("block {}: deadlock, every thread waits", index_);
  for (std::size_t begin = 0; begin < threads_.size();) {
    const auto line = [&](const Thread& t) {
      return t.state == Thread::State::finished ? std::string("has finished") : describe(t);
    };
    const std::string what = line(threads_[begin]);
    std::size_t end = begin + 1;
    while (end < threads_.size() && line(threads_[end]) == what) ++end;
    text += end == begin + 1 ? fmt::format("\n  thread {} {}", begin, what)
                             : fmt::format("\n  threads {}-{}: each {}", begin, end - 1, what);
    begin = end;
  }
  throw Fault(text);
}

bool Block::has_waited_for_previous_grid() const {
  return std::any_of(threads_.begin(), threads_.end(), [](const Thread& t) { return t.previous_grid_ended; });
}

void Block::check_finished() {
  for (Tally& t : tallies_) t.flush();
  int registers = 0;
  bool released = false;
  bool claimed = false;
  for (const Thread& t : threads_) {
    registers += t.registers;
    released |= t.released;
    claimed |= t.claimed;
    if (t.matrix.issued != t.matrix.retired) fail(t, "ended with WGMMAs that it has not waited for");
    if (t.storer != max_storers && t.clock[components_.storer(t.storer)] != t.stores) {
      fail(t, "ended with bulk stores that may still be reading shared memory: tma_store_wait is missing");
    }
  }
  const int threads = static_cast<int>(grid_.threads);
  if (const int given = initial_registers(grid_) * threads; registers > given) {
    fail(fmt::format("the threads claimed {} registers, the block was given {}: a claim would wait for ever",
                     registers, given));
  }
  if (released && !claimed) fail("released registers that no thread claims: claim_registers is missing");
  for (const Barrier& b : barriers_) {
    if (b.copies != 0)
      fail(fmt::format("ended with {} copies in flight to mbarrier +{}", b.copies, b.offset));
  }
}

std::uint32_t Block::storer_of(Thread& thread) {
  if (thread.storer == max_storers) {
    if (storers_ == max_storers) fail(fmt::format("more than {} threads issue bulk stores", max_storers));
    thread.storer = storers_++;
  }
  return thread.storer;
}

void launch(const std::function<void()>& kernel, const Grid& grid, const Options& options) {
  if (grid.threads == 0 || grid.threads % 32 != 0 || grid.threads > max_threads) {
    throw Fault(fmt::format("launch: {} threads a block; it takes a multiple of 32 up to {}", grid.threads,
                            max_threads));
  }
  if ((grid.shared_bytes + shared_window) * grid.blocks_per_sm > shared_limit) {
    throw Fault(fmt::format("launch: {} bytes of shared memory; {} blocks that share {} have less each",
                            grid.shared_bytes, grid.blocks_per_sm, shared_limit));
  }
  if (grid.cluster == 0 || grid.cluster > max_cluster || grid.blocks % grid.cluster != 0)
    throw Fault(fmt::format("launch: {} blocks in clusters of {}, which are of 1 to {}", grid.blocks,
                            grid.cluster, max_cluster));
  std::atomic<std::uint32_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  BlockStores stores;
  std::atomic<bool> waited{options.of_previous_grid.empty() && options.of_running_grid.empty()};
  const auto failed = [&] {
    next = grid.blocks;
    const std::lock_guard lock(mutex);
    if (!failure) failure = std::current_exception();
  };
  const auto run = [&](std::uint32_t index, Stacks& stacks, char* shared, Cluster* cluster) {
    try {
      Block block(index, grid, options, kernel, stacks, shared, cluster, stores);
      block.run();
      if (block.has_waited_for_previous_grid()) waited = true;
    } catch (...) {
      failed();
      if (cluster != nullptr) cluster->finish(index % grid.cluster);
    }
  };
  using Memory = std::unique_ptr<char, decltype(&std::free)>;
  const auto memory = [&] {
    return Memory(static_cast<char*>(std::aligned_alloc(1024, (grid.shared_bytes / 1024 + 1) * 1024)),
                  &std::free);
  };
  const auto work = [&] {
    Stacks stacks(grid.threads);
    const Memory shared = memory();
    for (std::uint32_t i = next.fetch_add(grid.cluster); i < grid.blocks; i = next.fetch_add(grid.cluster)) {
      if (grid.cluster == 1) {
        run(i, stacks, shared.get(), nullptr);
        continue;
      }
      Cluster cluster(grid.cluster);
      std::vector<std::thread> peers;
      for (unsigned rank = 1; rank < grid.cluster; ++rank) {
        peers.emplace_back([&, rank] {
          Stacks own_stacks(grid.threads);
          const Memory own = memory();
          run(i + rank, own_stacks, own.get(), &cluster);
        });
      }
      run(i, stacks, shared.get(), &cluster);
      for (std::thread& t : peers) t.join();
    }
  };
  std::vector<std::thread> others;
  for (unsigned i = 1; i < std::min(options.host_threads, grid.blocks / grid.cluster); ++i)
    others.emplace_back(work);
  work();
  for (std::thread& t : others) t.join();
  if (failure) std::rethrow_exception(failure);
  if (!waited && grid.blocks > 0)
    throw Fault(
        "the grid ended, and no block of it has waited for the grid before: that one may still write");
}

std::uint32_t thread_index() {
  return Block::current().self().index;
}
std::uint32_t block_index() {
  return Block::current().index();
}
std::uint32_t grid_size() {
  return Block::current().grid().blocks;
}
char* dynamic_shared() {
  return Block::current().shared();
}

std::uint32_t shared_address(const void* p) {
  return shared_window + Block::current().shared_offset(p, 0, "shared_address");
}

void release_registers(int count) {
  Block& block = Block::current();
  Thread& self = block.self();
  if (count > self.registers) {
    block.fail(fmt::format("release_registers to {}: it has only {}", count, self.registers));
  }
  self.registers = count;
  self.released = true;
}

void claim_registers(int count) {
  Block& block = Block::current();
  Thread& self = block.self();
  if (count < self.registers)
    block.fail(fmt::format("claim_registers to {}: it has {}", count, self.registers));
  self.registers = count;
  self.claimed = true;
}

}  // namespace tandem::emulator
