// Products with many rows of x on AMX: 16 rows of x meet 16 columns in one block at a time, because each block has a
// scale of its own. What a tile holds then is the block's product, which vector instructions scale and add up.
//
// Kept bfloat16: AMX sums a block's even columns and its odd ones apart, then adds the two, each step rounded once. That
// is the order of fp4_gemm.cpp. W4A4: x is quantised and dequantised to bfloat16, which loses nothing, and a block's
// product is an integer below 2^12 times a scale of 4 bits, exact in whatever order it is summed.
#include "fp4_gemm.h"

#if !defined(__AMX_BF16__)

int amx_gemm(const Call&, int, int) { return -1; }

#else

#include <cerrno>
#include <cstdlib>
#include <memory>
#include <type_traits>

#include "simd.h"

namespace {

constexpr int ROWS = 16;                      // of a tile
constexpr int X_BYTES = BLOCK * 2;            // of a row of a tile of x
constexpr int GROUP = ROWS * X_BYTES;         // of a block of ROWS rows of x
constexpr int W_ROWS = BLOCK / 2;             // of a tile of weights: [8][16 columns][2]
constexpr int W_BYTES = W_ROWS * 64;
constexpr int STAGES = 4;                     // of a block's way through the tiles
constexpr int MAX_GROUPS = 32;                // of ROWS rows of x that meet a panel
constexpr int MAX_CHUNK = 40;                 // blocks of a panel that are unpacked at once
constexpr int PREPARED = 64;                  // blocks that one thread prepares at once
constexpr int KEPT_ROWS = 9;                  // of x, at least: fewer are faster without tiles
constexpr int QUANTISED_ROWS = 48;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  TileConfig() {  // tiles 0..3 hold products, 4 and 5 x, 6 and 7 weights
    for (int t = 0; t < 8; ++t) row_bytes[t] = t == 4 || t == 5 ? X_BYTES : 64, rows[t] = t < 6 ? ROWS : W_ROWS;
  }
};

struct Scratch {
  alignas(64) uint8_t weights[MAX_CHUNK * 2 * W_BYTES];
  alignas(64) float scales[MAX_CHUNK * PANEL];
  alignas(64) float sums[MAX_GROUPS * ROWS * PANEL];
  alignas(64) float products[STAGES][ROWS * 16];
};

// Blocks first .. end - 1 of a row of x, to row `row` of their tiles, which lie GROUP apart. False unless every value is
// zero or between 2^-100 and 2^100: then neither a product nor a sum of them is subnormal or overflows.
bool keep(const Bf16* x, int64_t first, int64_t end, uint8_t* tiles, int row) {
  bool fits = true;
  for (int64_t b = first; b < end; ++b) {
    const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + b * BLOCK));
    const __m256i magnitude = _mm256_and_si256(values, _mm256_set1_epi16(0x7FFF));
    const __mmask16 small = _mm256_cmplt_epu16_mask(magnitude, _mm256_set1_epi16(27 << 7));
    const __mmask16 large = _mm256_cmpgt_epu16_mask(magnitude, _mm256_set1_epi16(227 << 7));
    fits &= !(large | (small & _mm256_test_epi16_mask(magnitude, magnitude)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(tiles + b * GROUP + row * X_BYTES), values);
  }
  return fits;
}

template <class T>
void quantise(const T* x, int64_t first, int64_t end, float global_scale_inv, uint8_t* tiles, int row) {
  Quantiser q;
  alignas(64) int8_t doubled[Quantiser::COUNT * BLOCK];
  for (int64_t b = first; b < end; b += Quantiser::COUNT) {
    const int count = static_cast<int>(std::min<int64_t>(Quantiser::COUNT, end - b));
    q.run(x + b * BLOCK, count, global_scale_inv, doubled, BLOCK);
    for (int i = 0; i < count; ++i) {
      const __m128i integers = _mm_load_si128(reinterpret_cast<const __m128i*>(doubled + i * BLOCK));
      const __m512 values = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(integers)),
                                          _mm512_set1_ps(q.scale[i] * 0.5f));
      const __m256i upper = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(values), 16));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(tiles + (b + i) * GROUP + row * X_BYTES), upper);
    }
  }
}

// e2m1 of 16 rows of a block in bfloat16: [k / 2][row][2].
void unpack(const uint8_t* codes, uint8_t* tile) {
  const __m512i upper = _mm512_load_si512(E2M1_UPPER), lower = _mm512_load_si512(E2M1_LOWER);
  UNROLL for (int z = 0; z < 2; ++z) {
    const __m512i both = _mm512_shuffle_epi8(_mm512_loadu_si512(codes + 64 * z), _mm512_load_si512(BY_ROW));
    UNROLL for (int h = 0; h < 2; ++h, tile += 128) {  // 4 k of each row
      const __m512i index = _mm512_and_si512(h ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
      const __m512i high = _mm512_shuffle_epi8(upper, index), low = _mm512_shuffle_epi8(lower, index);
      const __m512 first = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high));
      const __m512 second = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
      _mm512_store_ps(tile, _mm512_shuffle_ps(first, second, 0x88));
      _mm512_store_ps(tile + 64, _mm512_shuffle_ps(first, second, 0xDD));
    }
  }
}

// A tile's number is part of the instruction.
template <int STAGE>
inline __attribute__((always_inline)) void multiply_tiles(const uint8_t* x, const uint8_t* weights) {
#define MULTIPLY(C, A, B)         \
  if constexpr (STAGE == C) {     \
    _tile_zero(C);                \
    _tile_loadd(A, x, X_BYTES);   \
    _tile_loadd(B, weights, 64);  \
    _tile_dpbf16ps(C, A, B);      \
  }
  MULTIPLY(0, 4, 6)
  MULTIPLY(1, 5, 7)
  MULTIPLY(2, 4, 6)
  MULTIPLY(3, 5, 7)
#undef MULTIPLY
}

template <int STAGE>
inline __attribute__((always_inline)) void store_tile(float* product) {
  if constexpr (STAGE == 0) _tile_stored(0, product, 64);
  if constexpr (STAGE == 1) _tile_stored(1, product, 64);
  if constexpr (STAGE == 2) _tile_stored(2, product, 64);
  if constexpr (STAGE == 3) _tile_stored(3, product, 64);
}

// sums [ROWS][PANEL] += `count` blocks of a group of rows times 16 columns. It takes 50 cycles until a product is there:
// while one block is multiplied, the one two before it is stored and the one four before it is added.
void multiply(const uint8_t* x, const uint8_t* weights, const float* scales, int count, float (*products)[ROWS * 16],
              float* sums) {
  Simd::Float sum[ROWS];
  _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; ++r) sum[r] = Simd::load(sums + r * PANEL);
  auto start = [&](auto stage, int b) __attribute__((always_inline)) {
    multiply_tiles<stage.value>(x + b * GROUP, weights + b * 2 * W_BYTES);
  };
  auto end = [&](auto stage) __attribute__((always_inline)) { store_tile<stage.value>(products[stage.value]); };
  auto add = [&](auto stage, int b) __attribute__((always_inline)) {
    const Simd::Float scale = Simd::load(scales + b * PANEL);
    _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; ++r)
      sum[r] = Simd::fma(Simd::load(products[stage.value] + r * 16), scale, sum[r]);
  };
  constexpr std::integral_constant<int, 0> S0;
  constexpr std::integral_constant<int, 1> S1;
  constexpr std::integral_constant<int, 2> S2;
  constexpr std::integral_constant<int, 3> S3;
  int b = 0;
  if (count >= STAGES) {
    start(S0, 0), start(S1, 1), start(S2, 2), end(S0), start(S3, 3), end(S1);
    for (b = STAGES; b + STAGES <= count; b += STAGES) {
      add(S0, b - 4), start(S0, b), end(S2);
      add(S1, b - 3), start(S1, b + 1), end(S3);
      add(S2, b - 2), start(S2, b + 2), end(S0);
      add(S3, b - 1), start(S3, b + 3), end(S1);
    }
    end(S2), end(S3), add(S0, b - 4), add(S1, b - 3), add(S2, b - 2), add(S3, b - 1);
  }
  for (; b < count; ++b) start(S0, b), end(S0), add(S0, b);
  _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; ++r) Simd::store(sums + r * PANEL, sum[r]);
}

template <class T>
int gemm(const Call& c, int threads) {
  const int64_t groups = (c.m + ROWS - 1) / ROWS, group_bytes = c.blocks * GROUP;
  const int64_t tile = std::max<int64_t>(1, std::min<int64_t>(MAX_GROUPS, TILE_BYTES / group_bytes));
  const int64_t tiles = (groups + tile - 1) / tile, panels = (c.n + PANEL - 1) / PANEL;
  const int64_t pieces = (c.blocks + PREPARED - 1) / PREPARED, chunks = (c.blocks + MAX_CHUNK - 1) / MAX_CHUNK;
  const int64_t chunk = (c.blocks + chunks - 1) / chunks;
  std::unique_ptr<uint8_t, decltype(&free)> operand(static_cast<uint8_t*>(aligned_alloc(64, groups * group_bytes)),
                                                    &free);
  if (!operand) return ENOMEM;
  if (c.m % ROWS) memset(operand.get() + (groups - 1) * group_bytes, 0, group_bytes);
  bool fits = true;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(static) reduction(&& : fits)
    for (int64_t i = 0; i < c.m * pieces; ++i) {
      const int64_t m = i / pieces, first = i % pieces * PREPARED, end = std::min(first + PREPARED, c.blocks);
      const T* x = static_cast<const T*>(c.x) + m * c.x_stride;
      uint8_t* tiles_of_x = operand.get() + m / ROWS * group_bytes;
      if (c.input_scale) {
        quantise(x, first, end, *c.input_scale_inv, tiles_of_x, static_cast<int>(m % ROWS));
      } else if constexpr (std::is_same<T, Bf16>::value) {
        fits = keep(x, first, end, tiles_of_x, static_cast<int>(m % ROWS)) && fits;
      }
    }
    if (fits) {
      Scratch scratch;
      const TileConfig config;
      _tile_loadconfig(&config);
#pragma omp for schedule(static) nowait
      for (int64_t i = 0; i < tiles * panels; ++i) {
        const int64_t top = i / panels * tile, panel = i % panels, count = std::min(tile, groups - top);
        std::fill_n(scratch.sums, count * ROWS * PANEL, 0.0f);
        for (int64_t first = 0; first < c.blocks; first += chunk) {
          const int blocks = static_cast<int>(std::min(chunk, c.blocks - first));
          const uint8_t* codes = c.codes + (panel * c.blocks + first) * CODES;
          const uint8_t* scales = c.scales + (panel * c.blocks + first) * PANEL;
          for (int b = 0; b < blocks; ++b)
            for (int half = 0; half < 2; ++half) {
              unpack(codes_of(codes, b, 16 * half), scratch.weights + (2 * b + half) * W_BYTES);
              Simd::store(scratch.scales + b * PANEL + 16 * half,
                          Simd::mul(Simd::scales(scales + b * PANEL + 16 * half), Simd::constant(256.0f)));
            }
          for (int64_t g = 0; g < count; ++g)
            for (int half = 0; half < 2; ++half)
              multiply(operand.get() + (top + g) * group_bytes + first * GROUP, scratch.weights + half * W_BYTES,
                       scratch.scales + 16 * half, blocks, scratch.products, scratch.sums + g * ROWS * PANEL + 16 * half);
        }
        const int64_t m = top * ROWS;
        write<T>(c, m, static_cast<int>(std::min(count * ROWS, c.m - m)), panel * PANEL, scratch.sums);
      }
      _tile_release();
    }
  }
  return fits ? 0 : -1;
}

}  // namespace

int amx_gemm(const Call& c, int dtype, int threads) {
  if (c.m < (c.input_scale ? QUANTISED_ROWS : KEPT_ROWS) || (!c.input_scale && dtype != 1)) return -1;
  return dtype == 0 ? gemm<float>(c, threads) : dtype == 1 ? gemm<Bf16>(c, threads) : gemm<Fp16>(c, threads);
}

#endif
