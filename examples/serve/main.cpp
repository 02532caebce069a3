// Serves eight requests whose prompts begin alike, from a cache that is too small for all of them, and checks
// each: every row of its results has the bits of one call over the request alone.
#include <cstdio>

#include "server.hpp"

/// Whether all that was computed for `r`, in chunks and steps, out of shared pages and beside other requests,
/// is bit for bit what one call gives over its keys and values, gathered out of the pages.
static bool is_right(const Request& r, const PagedCache& cache) {
  std::vector<float> q, k, v, own_k, own_v;
  const auto gather = [&](const tandem::Tensor& pages, std::int64_t t, std::vector<float>& rows) {
    const std::int64_t row = r.pages[t / page_size] * page_size + t % page_size;
    const float* const numbers = static_cast<const float*>(pages.data) + row * key_numbers;
    rows.insert(rows.end(), numbers, numbers + key_numbers);
  };
  for (std::int64_t t = 0; t < r.cached; ++t) {
    project(r.tokens[t], t, 0, q);
    project(r.tokens[t], t, 1, own_k);
    project(r.tokens[t], t, 2, own_v);
    gather(cache.k(), t, k);
    gather(cache.v(), t, v);
  }
  if (k != own_k || v != own_v) return false;  // another request has written to its pages
  std::vector<float> out(q.size());
  tandem::ForwardArgs args;
  args.q = tensor(q, {1, r.cached, heads_q, head_dim});
  args.k = tensor(k, {1, r.cached, heads_kv, head_dim});
  args.v = tensor(v, {1, r.cached, heads_kv, head_dim});
  args.out = tensor(out, {1, r.cached, heads_q, head_dim});
  args.options.causal = true;
  args.options.split_size = split_size;
  tandem::forward(args);
  for (const auto& [t, row] : r.out) {
    if (std::memcmp(row.data(), &out[t * query_numbers], query_numbers * sizeof(float)) != 0) return false;
  }
  return r.out.contains(r.cached - 1);
}

int main() {
  PagedCache cache(40);
  Server server(cache);
  int right = 0, steps = 0;
  server.finished = [&](const Request& r) { right += is_right(r, cache) ? 1 : 0; };
  std::vector<Request> requests(8);
  for (int i = 0; i < 8; ++i) {  // a system prompt of 70 tokens, of two that there are, and a question
    for (int t = 0; t < 70; ++t) requests[i].tokens.push_back(1000 * (i % 2) + t);
    for (int t = 0; t < 9 + 23 * i; ++t) requests[i].tokens.push_back(10000 * (i + 1) + t);
    requests[i].wanted = requests[i].tokens.size() + 40;
    server.add(requests[i]);
  }
  for (; !server.idle(); ++steps) server.step();

  std::printf("8 requests in %d steps: %d pages shared, %d of them copied before a write, %d evictions\n",
              steps, server.shared, server.copied, server.evicted);
  std::printf("%d of 8 right, bit for bit; %d pages free\n", right, static_cast<int>(cache.free_pages()));
  return right == 8 && cache.free_pages() == 40 ? 0 : 1;
}
