// What the ways to compute a product share. The arithmetic and the layout of weights are described in fp4_gemm.cpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "activation.h"

static constexpr int PANEL = 32;                  // rows of a weight panel
static constexpr int CODES = BLOCK * PANEL / 2;   // bytes of a block of a panel
static constexpr int AHEAD = 4096;                // bytes of codes to fetch in advance
static constexpr int64_t TILE_BYTES = 1 << 20;    // rows of x that stay in the L2 cache
static constexpr int64_t THREAD_BYTES = 1 << 13;  // of x meeting a panel: work that pays for another thread

struct Call {
  const void* x;
  int64_t x_stride;
  const uint8_t* codes;
  const uint8_t* scales;
  const float* column_scale;
  const float* input_scale;  // null: x is kept
  const float* input_scale_inv;
  const void* bias;  // may be null
  void* out;
  int64_t m, n, blocks;
};

static inline const uint8_t* codes_of(const uint8_t* codes, int b, int row) {
  return codes + b * CODES + row / 16 * 128 + row % 16 * 4;
}

// For the reading of a block's codes and scales, those AHEAD bytes behind it. Always inlined: gcc takes a function that only
// prefetches for one without effect, and drops its calls.
static inline __attribute__((always_inline)) void fetch_ahead(const uint8_t* codes, const uint8_t* scales, int b) {
  for (int line = 0; line < CODES; line += 64) __builtin_prefetch(codes + b * CODES + AHEAD + line);
  __builtin_prefetch(scales + b * PANEL + AHEAD / 8);
}

template <class T>
static inline __attribute__((always_inline)) void write_columns(const Call& c, int64_t m, int rows, int64_t n,
                                                                int columns, const float* sums) {
  float scale[PANEL], bias[PANEL];
  for (int i = 0; i < columns; ++i) {
    scale[i] = c.input_scale ? c.column_scale[n + i] * *c.input_scale : c.column_scale[n + i];
    if (c.bias) bias[i] = to_float(static_cast<const T*>(c.bias)[n + i]);
  }
  for (int r = 0; r < rows; ++r, sums += PANEL) {
    T* out = static_cast<T*>(c.out) + (m + r) * c.n + n;
    for (int i = 0; i < columns; ++i) round_to(sums[i] * scale[i], out + i);
    if (c.bias)
      for (int i = 0; i < columns; ++i) round_to(to_float(out[i]) + bias[i], out + i);
  }
}

// Rows m .. m + rows - 1 of out, columns n .. n + PANEL - 1, from sums [rows][PANEL].
template <class T>
static void write(const Call& c, int64_t m, int rows, int64_t n, const float* sums) {
  if (c.n - n >= PANEL)
    write_columns<T>(c, m, rows, n, PANEL, sums);  // a constant, for the compiler
  else
    write_columns<T>(c, m, rows, n, static_cast<int>(c.n - n), sums);
}

// The product on tiles of AMX, with the same bits. Returns 0, ENOMEM, or -1 where it can't be had: this build has none, x
// is kept and not bfloat16, there are too few rows, or values of x are so small or large that AMX, which has no subnormal
// numbers, would differ.
int amx_gemm(const Call& c, int dtype, int threads);
