// One running block: its threads, their scheduler, and everything the threads share.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "clock.hpp"
#include "cluster.hpp"
#include "fiber.hpp"
#include "global_order.hpp"
#include "launch.hpp"
#include "matrix.hpp"
#include "recording.hpp"
#include "shadow.hpp"

namespace tandem::emulator {

/// Where dynamic shared memory begins in the shared window: behind the system's first kilobyte.
constexpr std::uint32_t shared_window = 1024;

/// What a suspended thread waits for; `thing` and `target` mean what `kind` says.
struct Wait {
  enum class Kind { none, barrier, named_barrier, warp, matrix, store, cluster };
  Kind kind = Kind::none;
  std::uint32_t thing = 0;   ///< index of the mbarrier, the named barrier, the warp or the warpgroup
  std::uint64_t target = 0;  ///< phase, generation, instruction or store that ends the wait
};

struct Thread {
  enum class State { ready, waiting, finished };
  std::uint32_t index = 0;
  State state = State::ready;
  Context context;
  Clock clock;
  Clocks peers;  ///< what it knows of the other blocks of its cluster
  Wait wait;
  std::vector<std::uint64_t> phases_seen;  ///< by mbarrier: how many completed phases its waits have seen
  MatrixThread matrix;
  // Bulk stores.
  std::uint32_t storer = max_storers;  ///< its component, once it has stored
  std::uint32_t stores = 0;            ///< issued
  std::uint32_t stores_done = 0;
  std::uint32_t stores_committed = 0;
  std::uint32_t stores_written = 0;         ///< that it has waited for until they were in global memory
  std::vector<std::uint32_t> store_groups;  ///< stores issued at each commit
  StoresKnown known_stores;                 ///< of the grid, by semaphores that it has read
  StoresKnown fenced_stores;                ///< those that its loads by TMA are behind
  int registers = 0;
  bool claimed = false;    ///< registers that others
  bool released = false;   ///< have released
  Tally* tally = nullptr;  ///< of lane 0 where the block is recorded
  /// A copy that the thread has started, and not waited for.
  struct Copy {
    void* shared;
    std::array<char, 16> data;
    std::size_t bytes;
    std::uint32_t group;  ///< that it is in
  };
  std::vector<Copy> copies;           ///< in their order
  std::uint32_t copy_groups = 0;      ///< committed
  bool previous_grid_ended = false;   ///< it has waited for it
  std::uint32_t fenced_barriers = 0;  ///< its clock when it last fenced mbarriers that it had initialised
  bool cluster_arrived = false;       ///< at the cluster's barrier, where it has not waited yet
  std::uint64_t cluster_barrier = 0;  ///< which of them, from 1
};

struct Barrier {
  std::uint32_t offset = 0;
  std::uint32_t arrivals = 0;
  std::uint32_t pending = 0;
  std::int64_t bytes = 0;  ///< announced and not yet copied
  std::uint64_t phase = 0;
  std::uint32_t copies = 0;  ///< in flight
  Event init;
  std::uint32_t fenced = 0;  ///< the initialising thread's clock at the fence behind it
  std::uint64_t stored = 0;  ///< the last phase, from 1, that stores of the cluster's blocks belong to
  Clock arriving;            ///< what this phase's arrivals have seen
  Clock completed;           ///< what a wait hands on
  Clocks peers_arriving;     ///< the same of the other blocks of the cluster
  Clocks peers_completed;
  std::vector<Thread*> waiting;
};

struct NamedBarrier {
  std::uint64_t generation = 0;
  std::uint32_t expected = 0;
  std::uint32_t arrived = 0;
  std::uint32_t first = 0;  ///< who opened this generation
  std::vector<bool> present;
  Clock seen;
  std::vector<Thread*> waiting;
};

/// A collective operation of a warp, and what its lanes bring along.
struct Warp {
  enum class Operation {
    shuffle_xor,
    shuffle,
    shuffle_up,
    ballot,
    reduce_or,
    reduce_max,
    sync,
    elect,
    ldmatrix,
    ldmatrix_transposed,
    stmatrix,
    stmatrix_transposed,
    mma
  };
  struct Deposit {
    std::uint32_t values[6];  ///< of mma: four words of A, two of B
    char* row;                ///< of mma: the lane's accumulators
  };
  std::uint64_t generation = 0;
  std::uint32_t arrived = 0;
  Operation operation = Operation::sync;
  std::uint32_t argument = 0;
  std::uint32_t first = 0;
  std::array<Deposit, 32> deposits[2];  ///< a lane may be one generation ahead of another's reading
  std::vector<Thread*> waiting;
};

class Block {
 public:
  Block(std::uint32_t index, const Grid& grid, const Options& options, const std::function<void()>& kernel,
        Stacks& stacks, char* shared, Cluster* cluster, BlockStores& stores);
  ~Block() { current_ = nullptr; }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  void run();
  [[nodiscard]] bool has_waited_for_previous_grid() const;

  /// Of this host thread; throws where none runs.
  static Block& current() {
    if (current_ == nullptr) no_current();
    return *current_;
  }
  [[nodiscard]] Thread& self() { return *running_; }
  [[nodiscard]] std::uint32_t index() const { return index_; }
  [[nodiscard]] const Grid& grid() const { return grid_; }
  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] const Components& components() const { return components_; }
  [[nodiscard]] Shadow& shadow() { return shadow_; }
  [[nodiscard]] GlobalOrder& global_order() { return global_order_; }
  [[nodiscard]] BlockStores& stores() { return stores_; }
  [[nodiscard]] BulkStores& bulk_stores() { return stores_.bulk; }
  /// The running thread's number in the grid.
  [[nodiscard]] std::uint64_t number_in_grid() {
    return std::uint64_t{index_} * grid_.threads + self().index;
  }
  /// The running thread's next bulk store is to global memory.
  void store_in_bulk(const void* p, std::size_t bytes);
  /// Throws where TMA may read before what it reads has been stored.
  void check_stores(const void* p, std::size_t bytes, const char* what);
  /// The block has seen what others have announced by a semaphore or a counter.
  void order_after_others() { after_others_ = true; }
  [[nodiscard]] bool after_others() const { return after_others_; }
  [[nodiscard]] char* shared() const { return shared_; }
  [[nodiscard]] std::uint32_t rank() const { return index_ % grid_.cluster; }
  /// The other block's, in a cluster of two; throws in others.
  std::uint32_t other_rank();
  /// Throws where there is none.
  Cluster& cluster();
  /// A thread is about to use the other block's shared memory, which that block must outlive.
  void reach_other() { reached_other_ = true; }
  /// Throws unless the running thread knows that the block of that rank has begun.
  void reach(std::uint32_t to);
  void send(std::uint32_t to, Message message);
  /// What the thread knows of all blocks of the cluster, this one included.
  [[nodiscard]] Clocks known(const Thread& thread) const;
  /// The running thread arrives at the cluster's barrier, and tells `known` to who waits there.
  void arrive_cluster(const Clocks& known);
  void wait_cluster();
  [[nodiscard]] std::uint32_t elected_lane() const { return elected_lane_; }

  /// Offset of p in dynamic shared memory; throws unless all `bytes` lie in it.
  std::uint32_t shared_offset(const void* p, std::size_t bytes, const char* what);
  /// Throws a Fault that names the running thread.
  [[noreturn]] void fail(const std::string& what);
  [[noreturn]] void fail(const Thread& who, const std::string& what);
  /// Throws unless [p, p + bytes) lies in one of the launch's buffers.
  void check_range(const void* p, std::size_t bytes, bool write, const char* what);
  /// Throws if `wrong` says something.
  void check(const std::string& wrong, std::uint32_t offset, const char* what);

  /// Suspends the running thread until someone calls wake.
  void suspend(Wait wait);
  void wake(Thread& thread);
  void wake_all(std::vector<Thread*>& threads);
  /// Sometimes lets another thread go first, where seeds explore interleavings.
  void maybe_yield();
  /// Lets another thread go first.
  void yield();
  /// Ends the running thread's epoch: what it does from here on is not covered by what it has released.
  void tick();
  /// Runs `action` after a random number of scheduling steps, or when nobody else can go on.
  void later(std::function<void()> action);
  std::uint32_t random(std::uint32_t bound);

  // Barriers, by their offset in shared memory.
  Barrier& barrier(void* p, const char* what);
  Barrier& create_barrier(void* p, std::uint32_t arrivals);
  [[nodiscard]] std::uint32_t barrier_index(const Barrier& b) const {
    return static_cast<std::uint32_t>(&b - barriers_.data());
  }
  void initialised_barriers_fenced();
  void complete_phase_if_due(Barrier& b);
  std::uint32_t storer_of(Thread& thread);

  std::array<NamedBarrier, 16> named_barriers;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;

 private:
  static constinit thread_local Block* current_;
  [[noreturn]] static void no_current();
  static void thread_main();
  Thread& next_thread();
  void resume(Thread& thread);
  void run_due_actions();
  void receive();
  void apply(const Message& message);
  void learn_joined(Thread& thread);
  void check_finished();
  /// Throws where another block of the cluster may still reach into this one, or this one may into another.
  void leave_cluster();
  void prepare_recording();
  [[nodiscard]] Clocks peer_clocks() const;
  [[noreturn]] void report_deadlock();
  [[nodiscard]] std::string describe(const Thread& thread) const;

  std::uint32_t index_;
  const Grid& grid_;
  const Options& options_;
  const std::function<void()>& kernel_;
  Components components_;
  Shadow shadow_;
  GlobalOrder global_order_;
  BlockStores& stores_;
  bool after_others_ = false;
  char* shared_;
  Cluster* cluster_;
  std::vector<Thread*> cluster_waiting_;
  bool reached_other_ = false;  ///< since the cluster's last barrier
  Clocks cluster_seen_;         ///< of those that have arrived at the barrier
  Clocks cluster_joined_;       ///< what the last barrier has told
  std::size_t cluster_arrivals_ = 0;
  std::uint64_t cluster_barriers_ = 0;  ///< at which all have come
  std::uint64_t random_state_;
  std::uint32_t elected_lane_ = 0;
  std::vector<Thread> threads_;
  std::vector<Tally> tallies_;  ///< by warp, where the block is recorded
  std::deque<Thread*> ready_;
  std::vector<Barrier> barriers_;
  std::multimap<std::uint64_t, std::function<void()>> actions_;
  std::uint64_t step_ = 0;
  std::uint32_t finished_ = 0;
  std::uint32_t storers_ = 0;
  Thread* running_ = nullptr;
  Context scheduler_;
  std::exception_ptr failure_;
};

/// With its place in the block.
std::string thread_name(std::uint32_t thread);

}  // namespace tandem::emulator
