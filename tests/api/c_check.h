/* Checks of the C interface's tests, which print what failed and go on. */
#pragma once

#include <stdio.h>
#include <string.h>

#include "tandem/tandem.h"

extern int failures;

#define CHECK(condition)                                             \
  do {                                                               \
    if (!(condition)) {                                              \
      printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      printf("  last error: %s\n", tandem_last_error());             \
      ++failures;                                                    \
    }                                                                \
  } while (0)

#define CHECK_FAILS(call, status, message)                                           \
  do {                                                                               \
    CHECK((call) == (status));                                                       \
    if (strcmp(tandem_last_error(), (message)) != 0) {                               \
      printf("%s:%d: message is \"%s\"\n", __FILE__, __LINE__, tandem_last_error()); \
      ++failures;                                                                    \
    }                                                                                \
  } while (0)

void test_cache(void);
void test_indices(void);
void test_functions(void);
void test_quantize(void);
