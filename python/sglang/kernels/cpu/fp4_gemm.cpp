// y = round((x W^T) * column scale [* input scale]) + bias for NVFP4 weights, the same bits on every CPU, for any
// number of rows and threads. Float32 sums run over the blocks of 16 columns in ascending order, sum = 0 at first:
//   W4A4: sum = round(sum + product of the blocks), which is exact, being one of integers times scales.
//   x kept: part = 0, part = round(part + x_k e2m1_k) for k = 0..15, sum = round(sum + part * scale).
//   bfloat16 x kept: even = 0, even = round(even + x_k (e2m1_k scale)) for the even k of two blocks, odd likewise for the
//     odd ones, sum = round(sum + round(even + odd)): that is how AMX adds.
//
// Weights: panels of 32 rows. codes [panels][K / 16][2][2][4][2][4][2]: byte (g, z, u, h, r, i) of a block holds
// columns 8 z + 2 h + i (low nibble) and 8 z + 4 + 2 h + i of row 16 g + 4 u + r. scales [panels][K / 16][32]: e4m3
// bits.

#include <omp.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "fp4_gemm.h"
#include "recorded.h"
#include "simd.h"

namespace {

constexpr int MAX_ROWS = 8;  // of x, that one weight register meets
constexpr int MAX_TILE = 192;
constexpr int PREPARED = 16;  // blocks that one thread prepares at once, of all rows that lie side by side
constexpr int APART = 128;    // blocks of x that a thread rather prepares for itself than waits for the others
constexpr int L = Simd::LANES;

struct Scratch {
  alignas(64) uint8_t weights[16 << 10];  // of some blocks, unpacked: half an L1 cache
  alignas(64) float scales[32 * PANEL];
  alignas(64) float sums[MAX_TILE * PANEL];
};

// A mode says how a block of one row of x is an operand of BYTES (prepare; a panel of up to ROWS rows holds, for each
// block, the parts of every row side by side), how CHUNK blocks of a weight panel are unpacked, and how an operand of R
// rows and `count` blocks is multiplied and added to sums [R][PANEL]: with unpacked weights, or, for up to ROWS
// rows in all, unpacking them on the way.

// 16 signed bytes 2 * e2m1; MAGIC_BITS - 12 * their sum, which takes the 12 off that weights carry; and the float32
// that turns the product with doubled weights and scales / 256 into a value.
struct Quantised {
  static constexpr int BYTES = BLOCK + 4 + 4, CHUNK = 32, ROWS = MAX_ROWS;

  template <class T>
  static void prepare(const Call& c, const T* x, int64_t first, int64_t end, uint8_t* panel, int rows, int r) {
    Quantiser q;
    for (int64_t b = first; b < end; b += Quantiser::COUNT) {
      const int count = static_cast<int>(std::min<int64_t>(Quantiser::COUNT, end - b));
      uint8_t* block = panel + b * rows * BYTES;
      q.run(x + b * BLOCK, count, *c.input_scale_inv, reinterpret_cast<int8_t*>(block) + r * BLOCK, rows * BYTES);
      for (int i = 0; i < count; ++i, block += rows * BYTES) {
        reinterpret_cast<int32_t*>(block + rows * BLOCK)[r] = MAGIC_BITS - 12 * q.sum[i];
        reinterpret_cast<float*>(block + rows * (BLOCK + 4))[r] = q.scale[i] * 64.0f;
      }
    }
  }

  // [block][vector][4][LANES] weights
  static void unpack(const uint8_t* codes, const uint8_t* scales, int count, Scratch& s) {
    uint8_t* out = s.weights;
    for (int b = 0; b < count; ++b) {
      fetch_ahead(codes, scales, b);
      for (int row = 0; row < PANEL; row += L) {
        Simd::Int w[4];
        Simd::unpack(codes_of(codes, b, row), w);
        UNROLL for (int q = 0; q < 4; ++q, out += 4 * L) Simd::store_weights(out, w[q]);
        Simd::store(s.scales + b * PANEL + row, Simd::scales(scales + b * PANEL + row));
      }
    }
  }

  template <int R, bool PACKED>
  static void multiply(const uint8_t* operand, const uint8_t* codes, const uint8_t* scales, const Scratch& s, int count,
                       float* sums) {
    constexpr int NV = PACKED && R == 1 ? 32 / L : Simd::VECTORS;
    for (int row = 0; row < PANEL; row += NV * L) {
      const uint8_t* a = operand;
      Simd::Float sum[R][NV];
      UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int v = 0; v < NV; ++v) sum[r][v] = Simd::load(sums + r * PANEL + row + v * L);
      for (int b = 0; b < count; ++b, a += R * BYTES) {
        const int8_t* bytes = reinterpret_cast<const int8_t*>(a);
        const int32_t* correction = reinterpret_cast<const int32_t*>(a + R * BLOCK);
        const float* worth = reinterpret_cast<const float*>(correction + R);
        if (PACKED && row == 0) fetch_ahead(codes, scales, b);
        UNROLL for (int v = 0; v < NV; ++v) {
          const int first = row + v * L;
          Simd::Int w[4];
          Simd::Float scale;
          if (PACKED) {
            Simd::unpack(codes_of(codes, b, first), w);
            scale = Simd::scales(scales + b * PANEL + first);
          } else {
            UNROLL for (int q = 0; q < 4; ++q)
              w[q] = Simd::load_weights(s.weights + b * BLOCK * PANEL + first * BLOCK + q * 4 * L);
            scale = Simd::load(s.scales + b * PANEL + first);
          }
          UNROLL for (int r = 0; r < R; ++r) {
            const Simd::Int product = Simd::dot(Simd::broadcast(correction + r), w, bytes + r * BLOCK);
            sum[r][v] = Simd::fma(Simd::scaled(product, scale), Simd::broadcast(worth + r), sum[r][v]);
          }
        }
      }
      UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int v = 0; v < NV; ++v) Simd::store(sums + r * PANEL + row + v * L, sum[r][v]);
    }
  }
};

// float32 [16][R]. FOLDED: weights are multiplied by their scale, and the columns of two blocks are added up together,
// those with even numbers apart from the others.
template <bool FOLDED>
struct Kept {
  static constexpr int BYTES = BLOCK * 4, CHUNK = 8, ROWS = Simd::KEPT_ROWS;
  static constexpr int SPAN = FOLDED ? 2 : 1, CHAINS = FOLDED ? 2 : 1;

  template <class T>
  static void prepare(const Call&, const T* x, int64_t first, int64_t end, uint8_t* panel, int rows, int r) {
    float* out = reinterpret_cast<float*>(panel) + r;
    for (int64_t k = first * BLOCK; k < end * BLOCK; ++k) out[k * rows] = to_float(x[k]);
  }

  static Simd::Float scales(const uint8_t* p) { return Simd::mul(Simd::scales(p), Simd::constant(256.0f)); }

#ifdef TABLES
  // Adds a block of one row of x to chains [CHAINS][NV]. A value's products with each e2m1, a table, serve all rows of the
  // weight, which saves their multiplication by the scale. They are divided by 8, so that none overflows, and exact.
  template <int NV>
  static inline __attribute__((always_inline)) void add_row(const float* x, const uint8_t* codes, const uint8_t* scales_,
                                                            Simd::Float (*chains)[1][NV]) {
    Simd::Float scale[NV];
    UNROLL for (int v = 0; v < NV; ++v) scale[v] = Simd::mul(Simd::scales(scales_ + v * L), Simd::constant(8 * 256.0f));
    UNROLL for (int z = 0; z < 2; ++z) {
      Simd::Int both[NV];
      UNROLL for (int v = 0; v < NV; ++v) both[v] = Simd::by_row(codes_of(codes, 0, v * L) + 64 * z);
      UNROLL for (int k = 0; k < 8; ++k) {
        const Simd::Float table = Simd::mul(Simd::load(E2M1_EIGHTHS), Simd::broadcast(x + 8 * z + k));
        UNROLL for (int v = 0; v < NV; ++v) {
          Simd::Float& chain = chains[k % CHAINS][0][v];
          chain = Simd::fma(Simd::column(both[v], k, table), scale[v], chain);
        }
      }
    }
  }
#endif

  // Of LANES rows; k = 4 * zh .. 4 * zh + 3.
  static inline __attribute__((always_inline)) void four(const uint8_t* codes, int zh, Simd::Float scale,
                                                         Simd::Float w[4]) {
    Simd::four(codes + zh / 2 * 64, zh % 2, w);
    if (FOLDED) UNROLL for (int k = 0; k < 4; ++k) w[k] = Simd::mul(w[k], scale);
  }

  // [block][group of KEPT_VECTORS][16][KEPT_VECTORS][LANES] float32
  static void unpack(const uint8_t* codes, const uint8_t* scales_, int count, Scratch& s) {
    constexpr int NV = Simd::KEPT_VECTORS;
    for (int b = 0; b < count; ++b) {
      fetch_ahead(codes, scales_, b);
      for (int row = 0; row < PANEL; row += L) {
        const int group = row / (NV * L) * NV * L;
        float* out = reinterpret_cast<float*>(s.weights) + (b * PANEL + group) * BLOCK + row - group;
        const Simd::Float scale = scales(scales_ + b * PANEL + row);
        UNROLL for (int zh = 0; zh < 4; ++zh) {
          Simd::Float w[4];
          four(codes_of(codes, b, row), zh, scale, w);
          UNROLL for (int k = 0; k < 4; ++k, out += NV * L) Simd::store(out, w[k]);
        }
        if (!FOLDED) Simd::store(s.scales + b * PANEL + row, scale);
      }
    }
  }

  template <int R, bool PACKED>
  static void multiply(const uint8_t* operand, const uint8_t* codes, const uint8_t* scales_, const Scratch& s,
                       int count, float* sums) {
    constexpr int NV = !PACKED ? Simd::KEPT_VECTORS : R <= 2 ? 32 / L : 1;
    for (int first = 0; first < count; first += SPAN) {
      const int end = std::min(first + SPAN, count);
      for (int row = 0; row < PANEL; row += NV * L) {
        Simd::Float chains[CHAINS][R][NV], scale[NV];
        UNROLL for (int c = 0; c < CHAINS; ++c)
          UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int v = 0; v < NV; ++v) chains[c][r][v] = Simd::constant(0.0f);
        for (int b = first; b < end; ++b) {
          const float* x = reinterpret_cast<const float*>(operand) + b * BLOCK * R;
          auto add = [&](int k, int r, int v, Simd::Float weight) __attribute__((always_inline)) {
            Simd::Float& chain = chains[k % CHAINS][r][v];
            chain = Simd::fma(Simd::broadcast(x + k * R + r), weight, chain);
          };
          if (PACKED) {
            if (row == 0) fetch_ahead(codes, scales_, b);
#ifdef TABLES
            if constexpr (FOLDED && R == 1) {
              add_row(x, codes_of(codes, b, row), scales_ + b * PANEL + row, chains);
              continue;
            }
#endif
            UNROLL for (int v = 0; v < NV; ++v) scale[v] = scales(scales_ + b * PANEL + row + v * L);
            UNROLL for (int zh = 0; zh < 4; ++zh)
              UNROLL for (int v = 0; v < NV; ++v) {
                Simd::Float w[4];
                four(codes_of(codes, b, row + v * L), zh, scale[v], w);
                UNROLL for (int k = 0; k < 4; ++k)
                  UNROLL for (int r = 0; r < R; ++r) add(4 * zh + k, r, v, w[k]);
              }
          } else {
            const float* w = reinterpret_cast<const float*>(s.weights) + (b * PANEL + row) * BLOCK;
            UNROLL for (int c = 0; c < CHAINS; ++c)
              _Pragma("GCC unroll 4") for (int k = c; k < BLOCK; k += CHAINS)
                UNROLL for (int r = 0; r < R; ++r)
                  UNROLL for (int v = 0; v < NV; ++v) add(k, r, v, Simd::load(w + (k * NV + v) * L));
            if (!FOLDED)
              UNROLL for (int v = 0; v < NV; ++v) scale[v] = Simd::load(s.scales + b * PANEL + row + v * L);
          }
        }
        UNROLL for (int v = 0; v < NV; ++v)
          UNROLL for (int r = 0; r < R; ++r) {
            float* sum = sums + r * PANEL + row + v * L;
            const Simd::Float before = Simd::load(sum);
            if constexpr (FOLDED)
              Simd::store(sum, Simd::add(before, Simd::add(chains[0][r][v], chains[1][r][v])));
            else
              Simd::store(sum, Simd::fma(chains[0][r][v], scale[v], before));
          }
      }
    }
  }
};

using Multiply = void (*)(const uint8_t*, const uint8_t*, const uint8_t*, const Scratch&, int, float*);

// What depends on the mode and on the type of x.
struct Kernels {
  int bytes, chunk, rows;
  Multiply multiply[2][MAX_ROWS];  // [packed][rows - 1], null where there are never so many
  void (*unpack)(const uint8_t*, const uint8_t*, int, Scratch&);
  void (*prepare)(const Call&, int64_t, int64_t, int64_t, uint8_t*, int, int);
  void (*write)(const Call&, int64_t, int, int64_t, const float*);
};

template <class Mode, class T>
void prepare(const Call& c, int64_t m, int64_t first, int64_t end, uint8_t* panel, int rows, int r) {
  Mode::prepare(c, static_cast<const T*>(c.x) + m * c.x_stride, first, end, panel, rows, r);
}

template <class Mode, int R, bool PACKED>
constexpr Multiply multiply() {
  if constexpr (R <= Mode::ROWS) return Mode::template multiply<R, PACKED>;
  return nullptr;
}

template <class Mode, class T>
constexpr Kernels KERNELS = {
    Mode::BYTES,
    Mode::CHUNK,
    Mode::ROWS,
    {{multiply<Mode, 1, false>(), multiply<Mode, 2, false>(), multiply<Mode, 3, false>(), multiply<Mode, 4, false>(),
      multiply<Mode, 5, false>(), multiply<Mode, 6, false>(), multiply<Mode, 7, false>(), multiply<Mode, 8, false>()},
     {multiply<Mode, 1, true>(), multiply<Mode, 2, true>(), multiply<Mode, 3, true>(), multiply<Mode, 4, true>(),
      multiply<Mode, 5, true>(), multiply<Mode, 6, true>(), multiply<Mode, 7, true>(), multiply<Mode, 8, true>()}},
    Mode::unpack,
    prepare<Mode, T>,
    write<T>,
};

int gemm(const Kernels& k, const Call& c, int threads) {
  // Rows are cut into `groups` panels of `height`, the last one shorter, and these are put together to tiles.
  const int64_t row_bytes = c.blocks * k.bytes, groups = (c.m + k.rows - 1) / k.rows;
  const int height = static_cast<int>((c.m + groups - 1) / groups);
  const int64_t fit = std::max<int64_t>(1, std::min<int64_t>(TILE_BYTES / (row_bytes * height), MAX_TILE / height));
  const int64_t tiles = (groups + fit - 1) / fit, tile = (groups + tiles - 1) / tiles * height;
  const int64_t panels = (c.n + PANEL - 1) / PANEL;
  const int64_t pieces = (c.blocks + PREPARED - 1) / PREPARED;
  const bool packed = c.m <= k.rows;  // unpacked weights would be used too rarely
  threads = static_cast<int>(std::min<int64_t>(threads, 1 + c.m * panels * row_bytes / THREAD_BYTES));
  const bool apart = c.m * c.blocks <= APART * threads;
  // A thread streams panels that follow each other, or takes as many of every tile as the others do, since tiles differ
  // in height.
  const int64_t share = tiles == 1 ? (panels + threads - 1) / threads : 1;
  const int64_t operand_bytes = c.m * row_bytes;
  std::unique_ptr<uint8_t, decltype(&free)> operands(
      static_cast<uint8_t*>(malloc(operand_bytes * (apart ? threads : 1))), &free);
  if (!operands) return ENOMEM;

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    uint8_t* const operand = operands.get() + (apart ? omp_get_thread_num() * operand_bytes : 0);
    auto prepare = [&](int64_t i) {
      const int64_t top = i / pieces * height, first = i % pieces * PREPARED;
      const int rows = static_cast<int>(std::min<int64_t>(height, c.m - top));
      for (int r = 0; r < rows; ++r)
        k.prepare(c, top + r, first, std::min(first + PREPARED, c.blocks), operand + top * row_bytes, rows, r);
    };
    if (apart) {
      for (int64_t i = 0; i < groups * pieces; ++i) prepare(i);
    } else {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < groups * pieces; ++i) prepare(i);
    }
    Scratch scratch;
#pragma omp for schedule(static, share) nowait
    for (int64_t i = 0; i < tiles * panels; ++i) {
      const int64_t top = i / panels * tile, panel = i % panels;
      const int in_tile = static_cast<int>(std::min(tile, c.m - top));
      std::fill_n(scratch.sums, in_tile * PANEL, 0.0f);
      for (int64_t b = 0; b < c.blocks; b += k.chunk) {
        const int count = static_cast<int>(std::min<int64_t>(k.chunk, c.blocks - b));
        const uint8_t* codes = c.codes + (panel * c.blocks + b) * CODES;
        const uint8_t* scales = c.scales + (panel * c.blocks + b) * PANEL;
        if (!packed) k.unpack(codes, scales, count, scratch);
        for (int m = 0; m < in_tile; m += height) {
          const int rows = std::min(height, in_tile - m);
          const uint8_t* a = operand + (top + m) * row_bytes + b * rows * k.bytes;
          k.multiply[packed][rows - 1](a, codes, scales, scratch, count, scratch.sums + m * PANEL);
        }
      }
      k.write(c, top, in_tile, panel * PANEL, scratch.sums);
    }
  }
  return 0;
}

}  // namespace

// x [m][x_stride] of `dtype` (0 float32, 1 bfloat16, 2 float16), out [m][n] and bias [n] likewise. k = 16 * blocks.
// Without input_scale x is kept. Returns 0, or ENOMEM.
extern "C" int sglang_fp4_gemm(const void* x, int64_t x_stride, const uint8_t* codes, const uint8_t* scales,
                               const float* column_scale, const float* input_scale, const float* input_scale_inv,
                               const void* bias, void* out, int64_t m, int64_t n, int64_t blocks, int dtype,
                               int threads) {
  const Call c{x, x_stride, codes, scales, column_scale, input_scale, input_scale_inv, bias, out, m, n, blocks};
  if (m == 0 || n == 0) return 0;
  const Kernels* kernels[3][2] = {{&KERNELS<Quantised, float>, &KERNELS<Kept<false>, float>},
                                  {&KERNELS<Quantised, Bf16>, &KERNELS<Kept<true>, Bf16>},
                                  {&KERNELS<Quantised, Fp16>, &KERNELS<Kept<false>, Fp16>}};
  if (const int result = amx_gemm(c, dtype, threads); result >= 0) return result;
  return gemm(*kernels[dtype][input_scale == nullptr], c, threads);
}

RECORDABLE(sglang_fp4_gemm)
