// Continuous batching: a step takes one token of each request that generates and a chunk of each that is
// still reading its prompt, in one call. When pages run out, the request that came last is evicted; it starts
// again once there is room, and reads what it had generated as a part of its prompt.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>

#include "pages.hpp"

constexpr std::int64_t chunk = 48;        // tokens of a prompt in one step
constexpr std::int64_t split_size = 128;  // a request's results do not depend on the batch, bit for bit
constexpr std::size_t most_running = 4;

struct Request {
  std::vector<int> tokens;          ///< the prompt, then what was generated
  std::size_t wanted = 0;           ///< tokens in the end
  std::int64_t cached = 0;          ///< so many first tokens have their keys and values in `pages`
  std::vector<std::int32_t> pages;  ///< one for each page_size tokens, some shared with other requests
  std::map<std::int64_t, std::vector<float>> out;  ///< attention's result by position, for main.cpp's check

  std::int64_t left() const { return std::ssize(tokens) - cached; }
};

/// A stand-in for the layers before attention: numbers from -1 to 1 that follow from token and position.
inline void project(int token, std::int64_t position, int which, std::vector<float>& rows) {
  std::uint64_t state = (static_cast<std::uint64_t>(token) << 40) ^ (position << 8) ^ which;
  for (std::int64_t i = which == 0 ? query_numbers : key_numbers; i > 0; --i) {
    state = (state + 0x9E3779B97F4A7C15U) * 0xBF58476D1CE4E5B9U;
    rows.push_back(static_cast<float>((state ^ state >> 31) >> 40) / 0x1p23F - 1.0F);
  }
}

class Server {
 public:
  explicit Server(PagedCache& cache) : cache_(cache) {}
  /// All its tokens must fit into the cache.
  void add(Request& request) { waiting_.push_back(&request); }
  bool idle() const { return waiting_.empty() && running_.empty(); }

  /// One call of append_kv, one of forward, and a token for every request whose last token was in it.
  void step() {
    while (!waiting_.empty() && running_.size() < most_running && admit(*waiting_.front())) {
      waiting_.pop_front();
    }
    std::vector<Request*> batch;
    std::vector<std::int32_t> ends{0};  // request b has rows [ends[b], ends[b + 1])
    for (std::size_t i = 0; i < running_.size(); ++i) {
      Request& r = *running_[i];
      const std::int64_t count = std::min(chunk, r.left());
      if (!make_room(r, r.cached + count)) break;  // r was the last one, and was evicted
      batch.push_back(&r);
      ends.push_back(static_cast<std::int32_t>(ends.back() + count));
    }
    attend(batch, ends);
    for (Request* r : batch) generate(*r);
  }

  std::function<void(const Request&)> finished;  ///< called while the request still has its pages
  int shared = 0, copied = 0, evicted = 0;       ///< pages, pages and requests

 private:
  /// Starts a request on the pages of the one whose tokens begin like its own; false: no room for the rest.
  bool admit(Request& r) {
    const Request* best = nullptr;
    std::int64_t common = 0;
    for (const Request* other : running_) {
      // Not the last token: its query is what the next token comes from.
      const auto end = r.tokens.begin() + std::min(other->cached, r.left() - 1);
      const auto same = std::mismatch(r.tokens.begin(), end, other->tokens.begin()).first - r.tokens.begin();
      if (same > common) best = other, common = same;
    }
    const std::int64_t of_own = r.left() - common / page_size * page_size;
    if (!running_.empty() && cache_.free_pages() * page_size < of_own) return false;
    for (std::int64_t i = 0; i * page_size < common; ++i, ++shared) {
      r.pages.push_back(best->pages[i]);
      cache_.share(r.pages.back());
    }
    r.cached = common;
    running_.push_back(&r);
    return true;
  }

  /// Pages for the tokens up to `end`, none of them shared that is written to; false: r was evicted.
  bool make_room(Request& r, std::int64_t end) {
    for (std::int64_t i = r.cached / page_size; i * page_size < end; ++i) {
      const bool fresh = i == std::ssize(r.pages);
      while ((fresh || cache_.is_shared(r.pages[i])) && cache_.free_pages() == 0) {
        if (evict() == &r) return false;
      }
      if (fresh) r.pages.push_back(cache_.take());
      if (!cache_.is_shared(r.pages[i])) continue;
      r.pages[i] = cache_.copy(r.pages[i]);  // it was shared when it was partly filled
      ++copied;
    }
    return true;
  }

  Request* evict() {
    Request* const r = running_.back();
    release(*r);
    waiting_.push_front(r);
    ++evicted;
    return r;
  }

  void release(Request& r) {
    for (const std::int32_t page : r.pages) cache_.give_back(page);
    r.pages.clear();
    r.cached = 0;
    std::erase(running_, &r);
  }

  /// The keys and values of all rows go to the cache; then each query attends to its request's tokens up to
  /// its own.
  void attend(const std::vector<Request*>& batch, const std::vector<std::int32_t>& ends) {
    std::vector<float> q, k, v;
    std::vector<std::int32_t> before, after, table;
    std::size_t width = 0;
    for (const Request* r : batch) width = std::max(width, r->pages.size());
    for (std::size_t b = 0; b < batch.size(); ++b) {
      const Request& r = *batch[b];
      before.push_back(static_cast<std::int32_t>(r.cached));
      after.push_back(before.back() + ends[b + 1] - ends[b]);
      for (std::int64_t t = before.back(); t < after.back(); ++t) {
        for (const auto& [which, rows] : {std::pair{0, &q}, {1, &k}, {2, &v}}) {
          project(r.tokens[t], t, which, *rows);
        }
      }
      table.insert(table.end(), r.pages.begin(), r.pages.end());
      table.resize((b + 1) * width, -1);
    }
    const auto integers = [](const std::vector<std::int32_t>& x) {
      return tandem::ConstTensor(x.data(), tandem::DType::i32, {std::ssize(x)});
    };
    tandem::AppendArgs append;
    append.k_new = tensor(k, {ends.back(), heads_kv, head_dim});
    append.v_new = tensor(v, {ends.back(), heads_kv, head_dim});
    append.cu_seqlens_new = integers(ends);
    append.cache_seqlens = integers(before);
    append.k_cache = cache_.k();
    append.v_cache = cache_.v();
    append.page_table = {
        table.data(), tandem::DType::i32, {std::ssize(batch), static_cast<std::int64_t>(width)}};
    append.check = true;
    tandem::append_kv(append);
    std::vector<float> out(q.size());
    tandem::ForwardArgs args;
    args.q = tensor(q, {ends.back(), heads_q, head_dim});
    args.k = append.k_cache;
    args.v = append.v_cache;
    args.out = tensor(out, {ends.back(), heads_q, head_dim});
    args.cu_seqlens_q = append.cu_seqlens_new;
    args.seqused_k = integers(after);
    args.page_table = append.page_table;
    args.options.causal = true;
    args.options.split_size = split_size;
    tandem::forward(args);
    auto row = out.begin();
    for (std::size_t b = 0; b < batch.size(); ++b) {
      for (Request& r = *batch[b]; r.cached < after[b]; row += query_numbers) {
        r.out[r.cached++] = {row, row + query_numbers};
      }
    }
  }

  /// A stand-in for the layers behind attention: the next token is where the last one's result is largest.
  void generate(Request& r) {
    if (r.left() > 0) return;
    const std::vector<float>& last = r.out[r.cached - 1];
    r.tokens.push_back(static_cast<int>(std::max_element(last.begin(), last.end()) - last.begin()));
    if (r.tokens.size() < r.wanted) return;
    finished(r);
    release(r);
  }

  PagedCache& cache_;
  std::deque<Request*> waiting_;
  std::vector<Request*> running_;
};
