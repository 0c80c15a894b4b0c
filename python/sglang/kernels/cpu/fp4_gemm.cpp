// y = round((x W^T) * column scale [* input scale]) + bias for NVFP4 weights, the same bits on every CPU, for any number
// of rows and threads: block products are exact integers, and float32 sums run over the blocks of K in ascending order.
//
// Weights: panels of 32 rows. codes [panels][K / 16][2][2][16][4]: byte (g, z, r, i) of a block holds columns
// 8 z + i (low nibble) and 8 z + 4 + i of row 16 g + r. scales [panels][K / 16][32]: e4m3 bits.

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "activation.h"
#include "simd.h"

namespace {

constexpr int PANEL = 32;         // rows of a weight panel
constexpr int ROWS = 6;           // rows of x that one weight register meets
constexpr int CHUNK = 32;         // blocks of K whose unpacked weights stay in the L1 cache: 20 KiB
constexpr int MAX_TILE = 32 * ROWS;
constexpr int64_t TILE_BYTES = 1 << 20;  // rows of x that stay in the L2 cache
constexpr int PREPARED = 64;      // blocks that one thread prepares at once
constexpr int64_t THREAD_BYTES = 1 << 13;  // of x meeting a panel: work that pays for another thread
constexpr int AHEAD = 2048;       // bytes of codes to fetch in advance, where a weight is read once
constexpr int STEP = Simd::LANES * Simd::VECTORS;

struct Scratch {
  alignas(64) uint8_t weights[CHUNK * BLOCK * PANEL];
  alignas(64) float scales[CHUNK * PANEL];
  alignas(64) float sums[MAX_TILE * PANEL];
};

struct Call {
  const void* x;
  int64_t x_stride;
  const uint8_t* codes;
  const uint8_t* scales;
  const float* column_scale;
  const float* input_scale;      // null: x is kept
  const float* input_scale_inv;
  const void* bias;              // may be null
  void* out;
  int64_t m, n, blocks;
};

// Unpacks `count` blocks of a panel: [block][step of the panel][vector][4][LANES] weights.
void unpack(const uint8_t* codes, const uint8_t* scales, int count, Scratch& s) {
  uint8_t* out = s.weights;
  for (int b = 0; b < count; ++b)
    for (int row = 0; row < PANEL; row += Simd::LANES) {
      Simd::Int w[4];
      Simd::unpack(codes + b * BLOCK * PANEL / 2 + row / 16 * 128 + row % 16 * 4, w);
      UNROLL for (int q = 0; q < 4; ++q, out += 4 * Simd::LANES) Simd::store_weights(out, w[q]);
      Simd::store(s.scales + b * PANEL + row, Simd::scales(scales + b * PANEL + row));
    }
}

// Adds `count` blocks to sums [R][PANEL], columns row .. row + STEP. PACKED: weights are unpacked on the way.
template <int R, int PLANES, bool PACKED>
void multiply(const uint8_t* a, const uint8_t* codes, const uint8_t* scales, const Scratch& unpacked, int count, int row,
              float* sums) {
  constexpr int NV = Simd::VECTORS, L = Simd::LANES;
  Simd::Float sum[R][NV];
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int v = 0; v < NV; ++v) sum[r][v] = Simd::load(sums + r * PANEL + v * L);
  for (int b = 0; b < count; ++b, a += R * operand_bytes(PLANES)) {
    Simd::Int w[NV][4];
    Simd::Float scale[NV];
    UNROLL for (int v = 0; v < NV; ++v) {
      const int first = row + v * L;
      if (PACKED) {
        const uint8_t* of_vector = codes + b * BLOCK * PANEL / 2 + first / 16 * 128 + first % 16 * 4;
        __builtin_prefetch(of_vector + AHEAD);
        __builtin_prefetch(of_vector + AHEAD + 64);
        __builtin_prefetch(scales + b * PANEL + first + AHEAD / 8);
        Simd::unpack(of_vector, w[v]);
        scale[v] = Simd::scales(scales + b * PANEL + first);
      } else {
        UNROLL for (int q = 0; q < 4; ++q)
          w[v][q] = Simd::load_weights(unpacked.weights + b * BLOCK * PANEL + first * BLOCK + q * 4 * L);
        scale[v] = Simd::load(unpacked.scales + b * PANEL + first);
      }
    }
    const int8_t* bytes = reinterpret_cast<const int8_t*>(a);
    const int32_t* correction = reinterpret_cast<const int32_t*>(a + R * PLANES * BLOCK);
    const float* worth = reinterpret_cast<const float*>(correction + R * accumulators(PLANES));
    UNROLL for (int r = 0; r < R; ++r) {
      const int8_t* plane = bytes + r * PLANES * BLOCK;
      UNROLL for (int v = 0; v < NV; ++v) {
        Simd::Float product;
        if (PLANES == 1) {
          product = Simd::scaled(Simd::dot(Simd::broadcast(correction + r), w[v], plane), scale[v]);
        } else {
          // Each plane is a chain of its own: one long chain would fill the scheduler with waiting instructions.
          const Simd::Int d0 = Simd::dot(Simd::zero(), w[v], plane);
          if (PLANES == 3) {
            const Simd::Int d1 = Simd::dot(Simd::zero(), w[v], plane + BLOCK);
            const Simd::Int d2 = Simd::dot(Simd::broadcast(correction + r), w[v], plane + 2 * BLOCK);
            product = Simd::rounded(Simd::add(Simd::times_256(Simd::add(Simd::times_256(d0), d1)), d2));
          } else {
            const Simd::Int d1 = Simd::dot(Simd::broadcast(correction + 2 * r), w[v], plane + BLOCK);
            const Simd::Int d2 = Simd::dot(Simd::zero(), w[v], plane + 2 * BLOCK);
            const Simd::Int d3 = Simd::dot(Simd::broadcast(correction + 2 * r + 1), w[v], plane + 3 * BLOCK);
            const Simd::Float high = Simd::rounded(Simd::add(Simd::times_256(d0), d1));
            const Simd::Float low = Simd::rounded(Simd::add(Simd::times_256(d2), d3));
            product = Simd::fma(high, Simd::constant(65536.0f), low);
          }
          product = Simd::mul(product, scale[v]);
        }
        sum[r][v] = Simd::fma(product, Simd::broadcast(worth + r), sum[r][v]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int v = 0; v < NV; ++v) Simd::store(sums + r * PANEL + v * L, sum[r][v]);
}

template <int PLANES, class T>
void prepare(const Call& c, int64_t m, int64_t first, int64_t end, uint8_t* panel, int rows, int r) {
  const T* x = static_cast<const T*>(c.x) + m * c.x_stride;
  auto part = [&](int64_t b, int64_t size, int64_t before) {
    return panel + b * rows * operand_bytes(PLANES) + rows * before + r * size;
  };
  auto bytes = [&](int64_t b) { return reinterpret_cast<int8_t*>(part(b, PLANES * BLOCK, 0)); };
  auto correction = [&](int64_t b) {
    return reinterpret_cast<int32_t*>(part(b, 4 * accumulators(PLANES), PLANES * BLOCK));
  };
  auto worth = [&](int64_t b) {
    return reinterpret_cast<float*>(part(b, 4, PLANES * BLOCK + 4 * accumulators(PLANES)));
  };
  if constexpr (PLANES == 1) {
    Quantiser q;
    for (int64_t b = first; b < end; b += Quantiser::COUNT) {
      const int count = static_cast<int>(std::min<int64_t>(Quantiser::COUNT, end - b));
      q.run(x + b * BLOCK, count, *c.input_scale_inv, bytes(b), rows * operand_bytes(1));
      for (int i = 0; i < count; ++i) {
        *correction(b + i) = MAGIC_BITS - 12 * q.sum[i];
        *worth(b + i) = q.scale[i] * 64.0f;
      }
    }
  } else {
    for (int64_t b = first; b < end; ++b) *worth(b) = keep<PLANES>(x + b * BLOCK, bytes(b), correction(b));
  }
}

template <class T>
void write(const Call& c, int64_t m, int rows, int64_t n, const float* sums) {
  const int columns = static_cast<int>(std::min<int64_t>(PANEL, c.n - n));
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

using Multiply = void (*)(const uint8_t*, const uint8_t*, const uint8_t*, const Scratch&, int, int, float*);

// What depends on the number of planes and on the type of x.
struct Kernels {
  int planes;
  Multiply multiply[2][ROWS];  // [packed][rows - 1]
  void (*prepare)(const Call&, int64_t, int64_t, int64_t, uint8_t*, int, int);
  void (*write)(const Call&, int64_t, int, int64_t, const float*);
};

template <int PLANES, class T>
constexpr Kernels KERNELS = {
    PLANES,
    {{multiply<1, PLANES, false>, multiply<2, PLANES, false>, multiply<3, PLANES, false>, multiply<4, PLANES, false>,
      multiply<5, PLANES, false>, multiply<6, PLANES, false>},
     {multiply<1, PLANES, true>, multiply<2, PLANES, true>, multiply<3, PLANES, true>, multiply<4, PLANES, true>,
      multiply<5, PLANES, true>, multiply<6, PLANES, true>}},
    prepare<PLANES, T>,
    write<T>,
};

int gemm(const Kernels& k, const Call& c, int threads) {
  // Tiles of rows are cut into panels of `height`, the last of each shorter.
  const int64_t block_bytes = operand_bytes(k.planes), row_bytes = c.blocks * block_bytes;
  const int64_t groups = (c.m + ROWS - 1) / ROWS;
  const int height = static_cast<int>((c.m + groups - 1) / groups);
  const int64_t fit = std::min<int64_t>(TILE_BYTES / (row_bytes * height), MAX_TILE / height);
  const int64_t tile = std::max<int64_t>(1, fit) * height;
  const int64_t tiles = (c.m + tile - 1) / tile, panels = (c.n + PANEL - 1) / PANEL;
  const int64_t pieces = (c.blocks + PREPARED - 1) / PREPARED;
  const bool packed = c.m <= height;  // unpacked weights would be used once
  std::unique_ptr<uint8_t, decltype(&free)> operand(static_cast<uint8_t*>(malloc(c.m * row_bytes)), &free);
  if (!operand) return ENOMEM;
  threads = static_cast<int>(std::min<int64_t>(threads, 1 + c.m * panels * row_bytes / THREAD_BYTES));

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < c.m * pieces; ++i) {
      const int64_t m = i / pieces, first = i % pieces * PREPARED, top = m / height * height;
      const int rows = static_cast<int>(std::min<int64_t>(height, c.m - top));
      k.prepare(c, m, first, std::min(first + PREPARED, c.blocks), operand.get() + top * row_bytes, rows,
                static_cast<int>(m - top));
    }
    Scratch scratch;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tiles * panels; ++i) {
      const int64_t top = i / panels * tile, panel = i % panels;
      const int in_tile = static_cast<int>(std::min(tile, c.m - top));
      std::fill_n(scratch.sums, in_tile * PANEL, 0.0f);
      for (int64_t b = 0; b < c.blocks; b += CHUNK) {
        const int count = static_cast<int>(std::min<int64_t>(CHUNK, c.blocks - b));
        const uint8_t* codes = c.codes + (panel * c.blocks + b) * BLOCK * PANEL / 2;
        const uint8_t* scales = c.scales + (panel * c.blocks + b) * PANEL;
        if (!packed) unpack(codes, scales, count, scratch);
        for (int m = 0; m < in_tile; m += height) {
          const int rows = std::min(height, in_tile - m);
          const uint8_t* a = operand.get() + (top + m) * row_bytes + b * rows * block_bytes;
          for (int row = 0; row < PANEL; row += STEP)
            k.multiply[packed][rows - 1](a, codes, scales, scratch, count, row, scratch.sums + m * PANEL + row);
        }
      }
      k.write(c, top, in_tile, panel * PANEL, scratch.sums);
    }
  }
  return 0;
}

}  // namespace

// x [m][x_stride] of `dtype` (0 float32, 1 bfloat16, 2 float16), out [m][n] and bias [n] likewise. k = 16 * blocks.
// Returns 0, or ENOMEM.
extern "C" int sglang_fp4_gemm(const void* x, int64_t x_stride, const uint8_t* codes, const uint8_t* scales,
                               const float* column_scale, const float* input_scale, const float* input_scale_inv,
                               const void* bias, void* out, int64_t m, int64_t n, int64_t blocks, int dtype,
                               int threads) {
  const Call c{x, x_stride, codes, scales, column_scale, input_scale, input_scale_inv, bias, out, m, n, blocks};
  if (m == 0 || n == 0) return 0;
  const Kernels* kernels[3][2] = {{&KERNELS<1, float>, &KERNELS<4, float>},
                                  {&KERNELS<1, Bf16>, &KERNELS<3, Bf16>},
                                  {&KERNELS<1, Fp16>, &KERNELS<3, Fp16>}};
  return gemm(*kernels[dtype][input_scale == nullptr], c, threads);
}
