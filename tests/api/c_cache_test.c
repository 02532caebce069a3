/* Caches in the C interface: an append in place, a merge, and the messages that C alone can give. */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "c_check.h"

int failures = 0;

#define CHECK_INVALID(call, message) CHECK_FAILS(call, tandem_invalid_argument, message)

enum { pages = 3, page_size = 2, head_dim = 4 };

static void test_append(void) {
  float k_new[2 * head_dim];
  float cache[pages * page_size * head_dim];
  for (int i = 0; i < 2 * head_dim; ++i) k_new[i] = (float)(i + 1);
  memset(cache, 0, sizeof cache);
  int32_t table[2] = {2, 0};
  int32_t before[1] = {1};
  tandem_append_args args = tandem_append_args_default();
  args.k_new = tandem_contiguous(k_new, tandem_f32, 4, (const int64_t[]){1, 2, 1, head_dim});
  args.k_cache = tandem_contiguous(cache, tandem_f32, 4, (const int64_t[]){pages, page_size, 1, head_dim});
  args.page_table = tandem_contiguous(table, tandem_i32, 2, (const int64_t[]){1, 2});
  args.cache_seqlens = tandem_contiguous(before, tandem_i32, 1, (const int64_t[]){1});
  args.check = 1;
  CHECK(tandem_append_kv(&args, NULL) == tandem_ok);
  for (int i = 0; i < pages * page_size * head_dim; ++i) {
    const int row = i / head_dim;
    const int token = row == 5 ? 0 : row == 0 ? 1 : -1; /* row 1 of page 2, row 0 of page 0 */
    CHECK(cache[i] == (token < 0 ? 0.0F : k_new[token * head_dim + i % head_dim]));
  }
  before[0] = 3;
  CHECK_INVALID(tandem_append_kv(&args, NULL),
                "cache_seqlens[0] is 3 and 2 tokens are appended; a sequence has rows 0 to 3 of the cache");

  /* The embedding of channels (0, 1) and (2, 3) needs 16 channels. */
  float cos[8] = {0};
  args.rotary_cos = args.rotary_sin = tandem_contiguous(cos, tandem_f32, 2, (const int64_t[]){1, 8});
  CHECK_INVALID(
      tandem_append_kv(&args, NULL),
      "rotary_cos has shape (1, 8): rotary_dim is 16; it must be a multiple of 16 and at most head_dim "
      "4");

  CHECK_INVALID(tandem_append_kv(NULL, NULL), "args is NULL; pass the address of a tandem_append_args");
  args.struct_size = 8;
  CHECK_INVALID(
      tandem_append_kv(&args, NULL),
      "args.struct_size is 8; set it to sizeof the struct, at least 1600 (the _default function does)");
}

/* Scales that are found by row, and a caller whose struct ends before them. */
static void test_found_scales(void) {
  float k_new[2 * head_dim] = {2.0F, -4.0F, 1.0F, 0.0F, 0.0F, 0.0F, 0.0F, 0.0F};
  int8_t cache[page_size * head_dim] = {0};
  float scales[page_size] = {NAN, NAN};
  int32_t before[1] = {0};
  tandem_append_args args = tandem_append_args_default();
  args.k_new = tandem_contiguous(k_new, tandem_f32, 4, (const int64_t[]){1, 2, 1, head_dim});
  args.k_cache = tandem_contiguous(cache, tandem_s8, 4, (const int64_t[]){1, page_size, 1, head_dim});
  args.cache_seqlens = tandem_contiguous(before, tandem_i32, 1, (const int64_t[]){1});
  args.k_scale_cache = tandem_contiguous(scales, tandem_f32, 3, (const int64_t[]){1, 1, page_size});
  CHECK(tandem_append_kv(&args, NULL) == tandem_ok);
  CHECK(scales[0] == 4.0F / 127.0F && scales[1] == 0.0F);
  CHECK(cache[0] == 64 && cache[1] == -127 && cache[2] == 32 && cache[3] == 0 && cache[4] == 0);
  scales[0] = 0.5F;
  args.struct_size = offsetof(tandem_append_args, k_scale_cache);
  CHECK(tandem_append_kv(&args, NULL) == tandem_ok);
  CHECK(scales[0] == 0.5F && cache[0] == 2 && cache[1] == -4);
}

static void test_merge(void) {
  float outs[2][2] = {{1.0F, -3.0F}, {5.0F, 1.0F}};
  float lses[2][1] = {{0.0F}, {0.0F}};
  float out[2] = {NAN, NAN};
  float lse[1] = {NAN};
  tandem_tensor parts[2];
  tandem_tensor statistics[2];
  for (int i = 0; i < 2; ++i) {
    parts[i] = tandem_contiguous(outs[i], tandem_f32, 4, (const int64_t[]){1, 1, 1, 2});
    statistics[i] = tandem_contiguous(lses[i], tandem_f32, 3, (const int64_t[]){1, 1, 1});
  }
  tandem_merge_args args = tandem_merge_args_default();
  args.parts = 2;
  args.outs = parts;
  args.lses = statistics;
  args.out = tandem_contiguous(out, tandem_f32, 4, (const int64_t[]){1, 1, 1, 2});
  args.lse = tandem_contiguous(lse, tandem_f32, 3, (const int64_t[]){1, 1, 1});
  CHECK(tandem_merge(&args, NULL) == tandem_ok);
  CHECK(out[0] == 3.0F && out[1] == -1.0F && fabsf(lse[0] - 0.6931472F) < 1e-6F);

  lses[1][0] = -INFINITY;
  CHECK(tandem_merge(&args, NULL) == tandem_ok);
  CHECK(out[0] == 1.0F && out[1] == -3.0F && lse[0] == 0.0F);

  CHECK_INVALID(tandem_merge(NULL, NULL), "args is NULL; pass the address of a tandem_merge_args");
  args.lses = NULL;
  CHECK_INVALID(tandem_merge(&args, NULL),
                "args.lses is NULL but parts is 2; pass the address of that many tensors");
  args.parts = -1;
  CHECK_INVALID(tandem_merge(&args, NULL), "parts is -1; it must be 1 at least");
  args.parts = 0;
  CHECK_INVALID(tandem_merge(&args, NULL), "outs has no parts; pass one at least");
  args.struct_size = 0;
  CHECK_INVALID(
      tandem_merge(&args, NULL),
      "args.struct_size is 0; set it to sizeof the struct, at least 208 (the _default function does)");
}

int main(void) {
  test_append();
  test_found_scales();
  test_merge();
  if (failures == 0) puts("ok");
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
