/* Attention over a cache in the C interface. */
#include <math.h>
#include <string.h>

#include "c_buffers.h"
#include "c_check.h"

/* k and v in pages of two rows, of which a sequence of three rows has the last and half of the first: the
 * same as the three rows in one tensor. A caller whose struct ends before the pages has none. */
void test_cache(void) {
  enum { pages = 3, page_size = 2, row = heads * head_dim };
  Buffers b;
  fill(&b);
  tandem_forward_args args = forward_args(&b);
  tandem_options options = tandem_options_default();
  options.causal = options.check = 1;
  args.options = &options;
  CHECK(tandem_forward(&args, NULL) == tandem_ok);
  check_forward_values(&b);
  const Buffers dense = b;

  float k[pages * page_size * row], v[pages * page_size * row];
  int32_t table[3] = {2, 0, -1};
  int64_t lengths[2] = {seqlen, 0};
  for (int i = 0; i < pages * page_size * row; ++i) k[i] = v[i] = NAN;
  memcpy(k + 2 * page_size * row, b.k, 2 * row * sizeof(float));
  memcpy(v + 2 * page_size * row, b.v, 2 * row * sizeof(float));
  memcpy(k, b.k + 2 * row, row * sizeof(float));
  memcpy(v, b.v + 2 * row, row * sizeof(float));
  fill(&b);
  CHECK(args.page_table.rank == 0 && args.leftpad_k.rank == 0 && args.cache_batch_idx.rank == 0);
  args.k = tandem_contiguous(k, tandem_f32, 4, (int64_t[]){pages, page_size, heads, head_dim});
  args.v = tandem_contiguous(v, tandem_f32, 4, (int64_t[]){pages, page_size, heads, head_dim});
  args.page_table = tandem_contiguous(table, tandem_i32, 2, (int64_t[]){1, 3});
  args.seqused_k = tandem_contiguous(lengths, tandem_i64, 1, (int64_t[]){1});
  CHECK(tandem_forward(&args, NULL) == tandem_ok);
  CHECK(memcmp(b.out, dense.out, sizeof(b.out)) == 0 && memcmp(b.lse, dense.lse, sizeof(b.lse)) == 0);
  char text[512];
  CHECK(tandem_forward_explain(&args, NULL, text, sizeof(text), NULL) == tandem_ok);
  CHECK(strstr(text, "also: seqused_k, page_table (3 pages of 2 rows), lse") != NULL);
  args.struct_size = 1160; /* the first version's */
  CHECK_FAILS(
      tandem_forward(&args, NULL), tandem_invalid_argument,
      "k has shape (3, 2, 2, 8); it must be (batch of q, seqlen_k, heads_kv, head_dim of q) = (1, 2, 2, 8)");
  args.struct_size = sizeof(args);
  table[1] = 3;
  CHECK_FAILS(tandem_forward(&args, NULL), tandem_invalid_argument,
              "page_table[0, 1] is 3; the 3 rows of sequence 0 need a page from 0 to 2 there");

  /* The second of two entries, whose first row is padding. */
  fill(&b);
  args = forward_args(&b);
  args.q = tandem_contiguous(b.q + row, tandem_f32, 4, (int64_t[]){1, 2, heads, head_dim});
  args.out = tandem_contiguous(b.out + row, tandem_f32, 4, (int64_t[]){1, 2, heads, head_dim});
  args.lse.rank = 0;
  args.lse.data = NULL;
  memcpy(k + 3 * row, b.k, sizeof(b.k));
  memcpy(v + 3 * row, b.v, sizeof(b.v));
  args.k = tandem_contiguous(k, tandem_f32, 4, (int64_t[]){2, seqlen, heads, head_dim});
  args.v = tandem_contiguous(v, tandem_f32, 4, (int64_t[]){2, seqlen, heads, head_dim});
  args.leftpad_k = tandem_contiguous(lengths + 1, tandem_i64, 1, (int64_t[]){1});
  lengths[0] = lengths[1] = 1;
  args.cache_batch_idx = tandem_contiguous(lengths, tandem_i64, 1, (int64_t[]){1});
  CHECK(tandem_forward(&args, NULL) == tandem_ok);
  tandem_forward_args same = forward_args(&b);
  same.q = args.q;
  same.k = tandem_contiguous(b.k + row, tandem_f32, 4, (int64_t[]){1, 2, heads, head_dim});
  same.v = tandem_contiguous(b.v + row, tandem_f32, 4, (int64_t[]){1, 2, heads, head_dim});
  same.out = tandem_contiguous(b.dq + row, tandem_f32, 4, (int64_t[]){1, 2, heads, head_dim});
  same.lse = args.lse;
  CHECK(tandem_forward(&same, NULL) == tandem_ok);
  CHECK(memcmp(b.out + row, b.dq + row, 2 * row * sizeof(float)) == 0);

  /* A flag for each sequence: of one that is not 0, the bits of a causal call. */
  int32_t flag = 1;
  args = forward_args(&b);
  args.options = &options;
  CHECK(tandem_forward(&args, NULL) == tandem_ok);
  same = forward_args(&b);
  same.out.data = b.dq;
  same.causal_by_sequence = tandem_contiguous(&flag, tandem_i32, 1, (int64_t[]){1});
  CHECK(tandem_forward(&same, NULL) == tandem_ok);
  CHECK(memcmp(b.out, b.dq, sizeof(b.out)) == 0);
  same.options = &options;
  CHECK(tandem_forward(&same, NULL) == tandem_invalid_argument);
}

/* Every query names the first key alone: its value is the result. */
void test_indices(void) {
  Buffers b;
  fill(&b);
  int32_t numbers[seqlen][2] = {{0}}, lengths_of[seqlen];
  for (int i = 0; i < seqlen; ++i) {
    numbers[i][1] = 1;
    lengths_of[i] = 1;
  }
  tandem_forward_args args = forward_args(&b);
  args.indices = tandem_contiguous(numbers, tandem_i32, 3, (int64_t[]){1, seqlen, 2});
  args.topk_length = tandem_contiguous(lengths_of, tandem_i32, 2, (int64_t[]){1, seqlen});
  CHECK(tandem_forward(&args, NULL) == tandem_ok);
  CHECK(memcmp(b.out, b.v, sizeof(b.v) / seqlen) == 0);
}
