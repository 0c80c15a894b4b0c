// Products with many rows of x on AMX, in bfloat16: the weights times their scales, which leaves them exact.
//
// A tile product adds up the products of even columns and those of odd ones, each step rounded once, and adds their sum to
// the running one. For kept x that is the order of fp4_gemm.cpp, with two blocks to a tile. For W4A4, x is quantised and
// dequantised, which loses nothing, and a tile holds one block: its product is an integer below 2^12 times two scales of
// 4 bits, exact in whatever order it is summed, and joins the sum in one step.
#include "fp4_gemm.h"

#if !defined(__AMX_BF16__)

int amx_gemm(const Call&, int, int) { return -1; }

#else

#include <cerrno>
#include <cstdlib>
#include <memory>

#include "amx.h"
#include "simd.h"

namespace {

constexpr int ROWS = 16;                       // of a tile
constexpr int BLOCK_BYTES = BLOCK * ROWS * 2;  // of a block of ROWS rows of x, or of 16 columns of weights
constexpr int64_t X_BYTES = 3 << 19;           // of x that meet a panel: what the L2 cache holds beside the rest
constexpr int MAX_GROUPS = 32;                 // of ROWS rows of it
constexpr int MAX_CHUNK = 24;                  // blocks of a panel that are unpacked at once, a multiple of 2
constexpr int PREPARED = 64;                   // blocks that one thread prepares at once, likewise
constexpr int KEPT_ROWS = 7;                   // of x, at least: fewer are faster without tiles
constexpr int QUANTISED_ROWS = 24;

struct Scratch {
  alignas(64) uint8_t weights[2][MAX_CHUNK * BLOCK_BYTES];
  alignas(64) float sums[MAX_GROUPS * ROWS * PANEL];
};

// Blocks first .. end - 1 of a row of x, each to at(block). False unless every value is zero or between 2^-100 and 2^100:
// then neither a product nor a sum of them is subnormal or overflows.
template <class F>
bool keep(const Bf16* x, int64_t first, int64_t end, F at) {
  bool fits = true;
  for (int64_t b = first; b < end; ++b) {
    const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + b * BLOCK));
    const __m256i magnitude = _mm256_and_si256(values, _mm256_set1_epi16(0x7FFF));
    const __mmask16 small = _mm256_cmplt_epu16_mask(magnitude, _mm256_set1_epi16(27 << 7));
    const __mmask16 large = _mm256_cmpgt_epu16_mask(magnitude, _mm256_set1_epi16(227 << 7));
    fits &= !(large | (small & _mm256_test_epi16_mask(magnitude, magnitude)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at(b)), values);
  }
  return fits;
}

// A quantised number times its scale is exact in bfloat16.
template <class T, class F>
void quantise(const T* x, int64_t first, int64_t end, float global_scale_inv, F at) {
  Quantiser q;
  for (int64_t b = first; b < end; b += Quantiser::COUNT) {
    const int count = static_cast<int>(std::min<int64_t>(Quantiser::COUNT, end - b));
    q.scales(x + b * BLOCK, count, global_scale_inv);
    for (int i = 0; i < count; ++i) {
      const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(q.values(i), _mm512_set1_ps(q.scale[i])));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(at(b + i)), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    }
  }
}

// `count` blocks of a panel in bfloat16, each half of it: [k / 2][16 rows][2].
void unpack(const uint8_t* codes, const uint8_t* scales, int count, uint8_t (*weights)[MAX_CHUNK * BLOCK_BYTES]) {
  for (int b = 0; b < count; ++b) {
    fetch_ahead(codes, scales, b);
    UNROLL for (int half = 0; half < 2; ++half) {
      const Simd::Float scale = Simd::mul(Simd::scales(scales + b * PANEL + 16 * half), Simd::constant(256.0f));
      uint8_t* tile = weights[half] + b * BLOCK_BYTES;
      UNROLL for (int zh = 0; zh < 4; ++zh) {
        Simd::Float w[4];
        Simd::four(codes_of(codes, b, 16 * half) + zh / 2 * 64, zh % 2, w);
        UNROLL for (int k = 0; k < 4; k += 2, tile += 64) {
          const __m512i even = _mm512_castps_si512(Simd::mul(w[k], scale));
          const __m512i odd = _mm512_castps_si512(Simd::mul(w[k + 1], scale));
          _mm512_store_si512(tile, _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(even, 16), odd));
        }
      }
    }
  }
}

// sums [ROWS][PANEL] of one or two groups of rows += `steps` tiles of x times tiles of weights.
template <int BLOCKS, bool TWO>
void multiply(const uint8_t* x, int64_t group_bytes, const uint8_t (*weights)[MAX_CHUNK * BLOCK_BYTES], int steps, bool fresh,
              float* sums) {
  constexpr int BYTES = BLOCKS * BLOCK_BYTES;
  constexpr int64_t X_ROW = BLOCKS * BLOCK * 2, W_ROW = 64, SUM_ROW = PANEL * 4;
  float* const second = sums + ROWS * PANEL;
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, SUM_ROW);
    _tile_loadd(1, sums + 16, SUM_ROW);
    if (TWO) {
      _tile_loadd(2, second, SUM_ROW);
      _tile_loadd(3, second + 16, SUM_ROW);
    }
  }
  for (int i = 0; i < steps; ++i) {
    _tile_loadd(4, x + i * BYTES, X_ROW);
    _tile_loadd(6, weights[0] + i * BYTES, W_ROW);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights[1] + i * BYTES, W_ROW);
    _tile_dpbf16ps(1, 4, 7);
    if (TWO) {
      _tile_loadd(5, x + group_bytes + i * BYTES, X_ROW);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, SUM_ROW);
  _tile_stored(1, sums + 16, SUM_ROW);
  if (TWO) {
    _tile_stored(2, second, SUM_ROW);
    _tile_stored(3, second + 16, SUM_ROW);
  }
}

// BLOCKS: of a tile.
template <class T, int BLOCKS>
int gemm(const Call& c, int threads) {
  const int64_t steps = (c.blocks + BLOCKS - 1) / BLOCKS, group_bytes = steps * BLOCKS * BLOCK_BYTES;
  const int64_t groups = (c.m + ROWS - 1) / ROWS;
  const int64_t pairs = (groups + 1) / 2;
  const int64_t fit = std::max<int64_t>(1, std::min<int64_t>(MAX_GROUPS / 2, X_BYTES / group_bytes / 2));
  const int64_t tiles = (pairs + fit - 1) / fit, tile = (pairs + tiles - 1) / tiles * 2;
  const int64_t panels = (c.n + PANEL - 1) / PANEL;
  const int64_t share = tiles == 1 ? (panels + threads - 1) / threads : 1;  // as in fp4_gemm.cpp
  const int64_t pieces = (c.blocks + PREPARED - 1) / PREPARED, chunks = (c.blocks + MAX_CHUNK - 1) / MAX_CHUNK;
  const int64_t chunk = ((c.blocks + chunks - 1) / chunks + BLOCKS - 1) / BLOCKS * BLOCKS;
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
      uint8_t* const rows = operand.get() + m / ROWS * group_bytes + m % ROWS * BLOCKS * BLOCK * 2;
      auto at = [=](int64_t b) { return rows + b / BLOCKS * BLOCKS * BLOCK_BYTES + b % BLOCKS * BLOCK * 2; };
      if constexpr (BLOCKS == 1)
        quantise(x, first, end, *c.input_scale_inv, at);
      else
        fits = keep(x, first, end, at) && fits;
      if (end == c.blocks && end % BLOCKS) memset(at(end), 0, BLOCK * 2);
    }
    if (fits) {
      Scratch scratch;
      const TileConfig config(BLOCKS * BLOCK);
      _tile_loadconfig(&config);
#pragma omp for schedule(static, share) nowait
      for (int64_t i = 0; i < tiles * panels; ++i) {
        const int64_t top = i / panels * tile, panel = i % panels, count = std::min(tile, groups - top);
        for (int64_t first = 0; first < c.blocks; first += chunk) {
          const int blocks = static_cast<int>(std::min(chunk, c.blocks - first));
          const uint8_t* codes = c.codes + (panel * c.blocks + first) * CODES;
          const uint8_t* scales = c.scales + (panel * c.blocks + first) * PANEL;
          unpack(codes, scales, blocks, scratch.weights);
          if (blocks % BLOCKS)
            for (uint8_t* half : {scratch.weights[0], scratch.weights[1]}) memset(half + blocks * BLOCK_BYTES, 0, BLOCK_BYTES);
          before_tiles_read();
          for (int64_t g = 0; g < count; g += 2) {
            const uint8_t* x = operand.get() + (top + g) * group_bytes + first * BLOCK_BYTES;
            const auto run = g + 1 < count ? multiply<BLOCKS, true> : multiply<BLOCKS, false>;
            float* const sums = scratch.sums + g * ROWS * PANEL;
            run(x, group_bytes, scratch.weights, (blocks + BLOCKS - 1) / BLOCKS, first == 0, sums);
            if (first + blocks == c.blocks) {
              const int64_t m = (top + g) * ROWS;
              write<T>(c, m, static_cast<int>(std::min<int64_t>(2 * ROWS, c.m - m)), panel * PANEL, sums);
            }
          }
        }
      }
      _tile_release();
    }
  }
  return fits ? 0 : -1;
}

}  // namespace

int amx_gemm(const Call& c, int dtype, int threads) {
  if (!c.input_scale) return dtype == 1 && c.m >= KEPT_ROWS ? gemm<Bf16, 2>(c, threads) : -1;
  if (c.m < QUANTISED_ROWS) return -1;
  return dtype == 0 ? gemm<float, 1>(c, threads) : dtype == 1 ? gemm<Bf16, 1>(c, threads) : gemm<Fp16, 1>(c, threads);
}

#endif
