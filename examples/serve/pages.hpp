// A cache of keys and values in pages: which pages are free, how many requests share each of them, and a copy
// of one's own for a request that writes to a shared page.
#pragma once

#include <tandem/cache.hpp>

#include <cstdint>
#include <cstring>
#include <vector>

/// What attention knows of the model. Numbers are f32; in bf16 nothing but their type would change.
constexpr std::int64_t heads_q = 8, heads_kv = 2, head_dim = 64;
constexpr std::int64_t query_numbers = heads_q * head_dim, key_numbers = heads_kv * head_dim;  // of a token
constexpr std::int64_t page_size = 16;                                                         // tokens

inline tandem::Tensor tensor(const std::vector<float>& numbers, std::initializer_list<std::int64_t> shape) {
  return {const_cast<float*>(numbers.data()), tandem::DType::f32, shape};
}

class PagedCache {
 public:
  explicit PagedCache(std::int64_t pages)
      : k_(pages * page_size * key_numbers), v_(k_.size()), users_(pages, 0) {
    while (pages-- > 0) free_.push_back(static_cast<std::int32_t>(pages));
  }

  std::int64_t free_pages() const { return static_cast<std::int64_t>(free_.size()); }
  bool is_shared(std::int32_t page) const { return users_[page] > 1; }

  /// A page that nobody has. Ask free_pages() first.
  std::int32_t take() {
    const std::int32_t page = free_.back();
    free_.pop_back();
    users_[page] = 1;
    return page;
  }
  void share(std::int32_t page) { ++users_[page]; }
  void give_back(std::int32_t page) {
    if (--users_[page] == 0) free_.push_back(page);
  }
  /// A copy of a shared page, for one of those who share it. Ask free_pages() first.
  std::int32_t copy(std::int32_t page) {
    const std::int32_t own = take();
    constexpr std::int64_t numbers = page_size * key_numbers;
    for (std::vector<float>* x : {&k_, &v_}) {
      std::memcpy(&(*x)[own * numbers], &(*x)[page * numbers], numbers * sizeof(float));
    }
    give_back(page);
    return own;
  }

  /// (pages, page_size, heads_kv, head_dim), as append_kv writes them and forward reads them.
  tandem::Tensor k() const { return tensor(k_, {std::ssize(users_), page_size, heads_kv, head_dim}); }
  tandem::Tensor v() const { return tensor(v_, {std::ssize(users_), page_size, heads_kv, head_dim}); }

 private:
  std::vector<float> k_, v_;
  std::vector<int> users_;  ///< of each page
  std::vector<std::int32_t> free_;
};
