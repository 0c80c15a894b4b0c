// Tiles of AMX: up to 16 rows of 64 bytes. 0 to 3 hold sums, 4 and 5 left operands, 6 and 7 right ones.
#pragma once

#if defined(__AMX_BF16__)
#include <immintrin.h>

#include <cstdint>

// For products of left operands [16][columns] with right ones [columns / 2][16][2].
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileConfig(int columns = 32) {
    for (int t = 0; t < 8; ++t) row_bytes[t] = t / 2 == 2 ? 2 * columns : 64, rows[t] = t / 2 == 3 ? columns / 2 : 16;
  }
};

// gcc doesn't know that loading a tile reads memory: what was stored before must be stored by now.
static inline void before_tiles_read() { asm volatile("" ::: "memory"); }

#endif
