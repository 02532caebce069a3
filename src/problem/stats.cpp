#include "problem/stats.hpp"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <new>
#include <utility>

namespace tandem {
namespace {

enum class Table : int { calls, kernels, errors };
/// The time of calls is in ticks, that of kernels in nanoseconds.
enum Value : std::size_t { count, time_spent, bytes, operations, workspace_peak, value_count };

struct Key {
  Table table;
  std::array<const char*, 4> texts;  ///< literals, compared by address
  bool operator==(const Key&) const = default;
};

/// Counters of one kind, in one thread. Never freed.
struct Cell {
  explicit Cell(const Key& kind, Cell* before) : key(kind), next(before) {}
  const Key key;
  Cell* const next;
  std::array<std::atomic<std::uint64_t>, value_count> values{};

  // The thread is the only one that writes: no addition is lost, and none has to lock the bus.
  void add(Value which, std::uint64_t n) noexcept {
    values[which].store(values[which].load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
};

/// The cells of a thread, and after its end of another. Never freed.
struct Shard {
  std::atomic<Cell*> cells{nullptr};
  std::atomic<bool> owned{true};
  Shard* next = nullptr;
};

constinit std::atomic<Shard*> shards{nullptr};

// A sink that was exchanged may still be called by calls that have begun.
constinit std::atomic<EventSink> event_sink{nullptr};
constinit std::atomic<unsigned> event_every{0};

struct Owner {
  Shard* shard = nullptr;
  ~Owner() {
    if (shard != nullptr) shard->owned.store(false, std::memory_order_release);
    shard = nullptr;  // what this thread still counts goes to another shard
  }
};
thread_local Owner owner;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

template <typename F>
void for_each_cell(F&& f) {
  for (Shard* s = shards.load(std::memory_order_acquire); s != nullptr; s = s->next) {
    for (Cell* c = s->cells.load(std::memory_order_acquire); c != nullptr; c = c->next) f(*c);
  }
}

/// A forked process has done nothing yet, and the parent's other threads are not in it.
void begin_again() {
  for (Shard* s = shards.load(); s != nullptr; s = s->next) s->owned.store(s == owner.shard);
  for_each_cell([](Cell& cell) {
    for (auto& value : cell.values) value.store(0, std::memory_order_relaxed);
  });
}

Shard* claim_shard() {
  static const int at_fork = pthread_atfork(nullptr, nullptr, &begin_again);
  static_cast<void>(at_fork);
  for (Shard* s = shards.load(std::memory_order_acquire); s != nullptr; s = s->next) {
    if (!s->owned.load(std::memory_order_relaxed) && !s->owned.exchange(true, std::memory_order_acquire))
      return s;
  }
  auto* made = new Shard;
  made->next = shards.load(std::memory_order_relaxed);
  while (!shards.compare_exchange_weak(made->next, made, std::memory_order_release)) {
  }
  return made;
}

/// This thread's cell of that kind; null where there is no memory for one, and nothing is counted.
Cell* cell_of(const Key& key) noexcept try {
  if (owner.shard == nullptr) owner.shard = claim_shard();
  Cell* const first = owner.shard->cells.load(std::memory_order_relaxed);
  for (Cell* c = first; c != nullptr; c = c->next) {
    if (c->key == key) return c;
  }
  auto* made = new Cell(key, first);
  owner.shard->cells.store(made, std::memory_order_release);
  return made;
} catch (const std::bad_alloc&) {
  return nullptr;
}

/// Nanoseconds a tick, from how far both clocks have come since the library was loaded.
class Rate {
 public:
  [[nodiscard]] double now() const {
    const std::chrono::duration<double, std::nano> passed = std::chrono::steady_clock::now() - time_;
    const std::uint64_t ticked = ticks() - ticks_;
    return ticked == 0 ? 1.0 : passed.count() / static_cast<double>(ticked);
  }

 private:
  std::chrono::steady_clock::time_point time_ = std::chrono::steady_clock::now();
  std::uint64_t ticks_ = ticks();
};
const Rate rate;

using Values = std::array<std::uint64_t, value_count>;

/// What all threads have counted, by texts rather than addresses: a literal may be in several places.
auto sums() {
  std::map<std::pair<Table, std::array<std::string_view, 4>>, Values> found;
  for_each_cell([&found](const Cell& cell) {
    std::array<std::string_view, 4> texts;
    std::ranges::copy(cell.key.texts, texts.begin());
    Values& sum = found[{cell.key.table, texts}];
    for (std::size_t i = 0; i < value_count; ++i) {
      const std::uint64_t value = cell.values[i].load(std::memory_order_relaxed);
      sum[i] = i == workspace_peak ? std::max(sum[i], value) : sum[i] + value;
    }
  });
  std::erase_if(found, [](const auto& entry) { return entry.second[count] == 0; });
  return found;
}

const char* name_of(Status status) {
  switch (status) {
    case Status::ok: break;
    case Status::invalid_argument: return "invalid_argument";
    case Status::unsupported: return "unsupported";
    case Status::out_of_memory: return "out_of_memory";
    case Status::runtime: return "runtime";
    case Status::internal: return "internal";
    case Status::interrupted: return "interrupted";
  }
  return "ok";
}

/// A label's value: the format escapes these three.
std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    out += c == '\n' ? std::string("\\n") : std::string(1, c);
  }
  return out;
}

/// A family of samples in the text format; `value_of` an element of `rows`, `labels_of` its labels.
template <typename Rows, typename LabelsOf, typename ValueOf>
void write_family(std::string& text, std::string_view name, const char* type, std::string_view help,
                  const Rows& rows, LabelsOf&& labels_of, ValueOf&& value_of) {
  text += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
  for (const auto& row : rows)
    text += fmt::format("{}{{{}}} {}\n", name, labels_of(row), std::invoke(value_of, row));
}

double seconds(std::uint64_t nanoseconds) {
  return 1e-9 * static_cast<double>(nanoseconds);
}

}  // namespace

void count_call(const CallKind& kind, const CallWork& work, std::uint64_t spent) noexcept {
  Cell* cell = cell_of({Table::calls, {kind.operation, kind.backend, kind.family, kind.kernel}});
  if (cell == nullptr) return;
  cell->add(count, 1);
  cell->add(time_spent, spent);
  cell->add(bytes, work.bytes);
  cell->add(operations, work.operations);
  auto& peak = cell->values[workspace_peak];
  if (work.workspace_bytes > peak.load(std::memory_order_relaxed))
    peak.store(work.workspace_bytes, std::memory_order_relaxed);
}

void count_kernel(const char* origin, std::chrono::nanoseconds spent) noexcept {
  Cell* cell = cell_of({Table::kernels, {origin, "", "", ""}});
  if (cell == nullptr) return;
  cell->add(count, 1);
  cell->add(time_spent, static_cast<std::uint64_t>(spent.count()));
}

void count_error(Status status, const char* rule) noexcept {
  if (Cell* cell = cell_of({Table::errors, {name_of(status), rule, "", ""}})) cell->add(count, 1);
}

void set_events(EventSink sink, unsigned every) noexcept {
  event_sink = every == 0 ? nullptr : sink;
  event_every = sink == nullptr ? 0 : every;
}

bool events_are_watched() noexcept {
  return event_every.load(std::memory_order_relaxed) != 0;
}

bool is_sampled() noexcept {
  const unsigned every = event_every.load(std::memory_order_relaxed);
  if (every == 0) return false;
  thread_local unsigned calls = 0;
  return calls++ % every == 0;
}

void send_event(const Event& event) noexcept {
  if (const EventSink sink = event_sink) sink(event);
}

std::uint64_t nanoseconds_of(std::uint64_t spent) noexcept {
  return static_cast<std::uint64_t>(rate.now() * static_cast<double>(spent));
}

Stats stats() {
  Stats all;
  const double tick = rate.now();
  for (const auto& [key, sum] : sums()) {
    const auto& [table, texts] = key;
    if (table == Table::calls) {
      const auto nanoseconds = static_cast<std::uint64_t>(tick * static_cast<double>(sum[time_spent]));
      all.calls.push_back({texts[0], texts[1], texts[2], texts[3], sum[count], nanoseconds, sum[bytes],
                           sum[operations], sum[workspace_peak]});
    } else if (table == Table::kernels) {
      all.kernels.push_back({texts[0], sum[count], sum[time_spent]});
    } else {
      all.errors.push_back({texts[0], texts[1], sum[count]});
    }
  }
  return all;
}

std::string stats_text() {
  const Stats all = stats();
  std::string text;
  const auto of_call = [](const CallStats& c) {
    return fmt::format(R"(operation="{}",backend="{}",family="{}",kernel="{}")", c.operation, c.backend,
                       c.family, c.kernel);
  };
  const auto of_kernel = [](const KernelStats& k) { return fmt::format(R"(origin="{}")", k.origin); };
  const auto calls = [&](std::string_view name, const char* type, std::string_view help, auto&& value_of) {
    write_family(text, name, type, help, all.calls, of_call, value_of);
  };
  calls("tandem_calls_total", "counter", "Calls that have returned.", &CallStats::calls);
  calls("tandem_call_seconds_total", "counter", "Time in the library; work on a GPU is queued.",
        [](const CallStats& c) { return seconds(c.nanoseconds); });
  calls("tandem_bytes_total", "counter", "Bytes read and written once, as shapes say.", &CallStats::bytes);
  calls("tandem_operations_total", "counter", "FLOP of the products, as shapes say.", &CallStats::operations);
  calls("tandem_workspace_peak_bytes", "gauge", "The most scratch memory of one call.",
        &CallStats::workspace_peak);
  write_family(text, "tandem_kernels_total", "counter", "GPU kernels found, by where.", all.kernels,
               of_kernel, &KernelStats::kernels);
  write_family(text, "tandem_kernel_seconds_total", "counter", "Time spent on finding or compiling them.",
               all.kernels, of_kernel, [](const KernelStats& k) { return seconds(k.nanoseconds); });
  write_family(
      text, "tandem_errors_total", "counter", "Errors thrown, by rule.", all.errors,
      [](const ErrorStats& e) { return fmt::format(R"(status="{}",rule="{}")", e.status, escaped(e.rule)); },
      &ErrorStats::errors);
  return text;
}

}  // namespace tandem
