// x W^T for a bfloat16 matrix that is read as it lies: exact products, float32 sums.
#include <algorithm>
#include <cerrno>
#include <new>
#include <vector>

#include "recorded.h"
#include "vector.h"

namespace {

constexpr int64_t PIECE = 2048;              // values of a row whose products are summed before they meet the others
constexpr int64_t TILE_BYTES = 256 << 10;    // of x, read again for every four columns
constexpr int64_t PAGE_BYTES = 4096;
constexpr int64_t THREAD_VALUES = 1 << 16;

struct Call {
  const float* x;
  int64_t x_stride;
  const Bf16* weight;
  const float* bias;
  float* out;
  int64_t n, k;
};

// Rows m .. m + MR - 1 of x; columns n, n + step, n + 2 step, n + 3 step before `end`.
template <int MR>
void block(const Call& c, int64_t m, int64_t n, int64_t step, int64_t end, int64_t first, int64_t count) {
  const float* a[MR];
  const Bf16* b[4];
  float sums[MR][4];
  for (int i = 0; i < MR; ++i) a[i] = c.x + (m + i) * c.x_stride + first;
  for (int j = 0; j < 4; ++j) b[j] = c.weight + std::min(n + j * step, end - 1) * c.k + first;
  dots<MR>(a, b, count, sums);
  for (int i = 0; i < MR; ++i)
    for (int j = 0; j < 4 && n + j * step < end; ++j) {
      float* out = c.out + (m + i) * c.n + n + j * step;
      *out = sums[i][j] + (first ? *out : 0.0f);
    }
}

using Block = void (*)(const Call&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
#if defined(__AVX512F__)
constexpr Block BLOCKS[] = {block<1>, block<2>, block<3>, block<4>, block<5>, block<6>};
#else
constexpr Block BLOCKS[] = {block<1>, block<2>, block<3>};
#endif
static_assert(sizeof BLOCKS / sizeof *BLOCKS == DOT_ROWS, "one for each height");

void multiply(const Call& c, int64_t m, int threads) {
  const int64_t n = c.n, k = c.k;
  const int64_t piece = std::min(k, PIECE);
  const int64_t tile = std::max<int64_t>(1, TILE_BYTES / std::max<int64_t>(1, 4 * piece * DOT_ROWS)) * DOT_ROWS;
  threads = static_cast<int>(std::min<int64_t>(threads, 1 + m * n * k / THREAD_VALUES));
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t part = 0; part < threads; ++part) {
    // Four columns whose rows of the matrix lie in different pages: each is the next piece of a stream that the
    // processor reads ahead. Four places in one page it takes for nothing regular, which halves the speed.
    const int64_t begin = n * part / threads, end = n * (part + 1) / threads;
    const bool apart = 2 * k < PAGE_BYTES;
    const int64_t step = apart ? (end - begin + 3) / 4 : 1;
    const int64_t stop = apart ? begin + step : end, stride = apart ? 1 : 4;
    for (int64_t top = 0; top < m; top += tile) {
      const int64_t bottom = std::min(m, top + tile);
      for (int64_t first = 0; first < std::max<int64_t>(k, 1); first += PIECE)
        for (int64_t column = begin; column < stop; column += stride)
          for (int64_t row = top; row < bottom; row += DOT_ROWS)
            BLOCKS[std::min<int64_t>(DOT_ROWS, bottom - row) - 1](c, row, column, step, end, first,
                                                                  std::min(PIECE, k - first));
      if (c.bias)
        for (int64_t row = top; row < bottom; ++row)
          for (int64_t column = begin; column < end; ++column) c.out[row * n + column] += c.bias[column];
    }
  }
}

}  // namespace

// out [m][n] = x [m][k] (rows x_stride apart) weight [n][k]^T + bias [n] (or null). x_dtype: 0 float32, 1 bfloat16.
// Returns 0, or ENOMEM.
extern "C" int sglang_bf16_linear(const void* x, int64_t x_stride, const void* weight, const float* bias, float* out,
                                  int64_t m, int64_t n, int64_t k, int x_dtype, int threads) {
  Call c{static_cast<const float*>(x), x_stride, static_cast<const Bf16*>(weight), bias, out, n, k};
  std::vector<float> widened;
  if (x_dtype == 1) {
    try {
      widened.resize(m * k);
    } catch (const std::bad_alloc&) {
      return ENOMEM;
    }
    for (int64_t row = 0; row < m; ++row) {
      const Bf16* from = static_cast<const Bf16*>(x) + row * x_stride;
      float* to = &widened[row * k];
      pieces(k, [&](int64_t i, int64_t count) { store_some(to + i, load_some(from + i, count), count); });
    }
    c.x = widened.data(), c.x_stride = k;
  }
  multiply(c, m, threads);
  return 0;
}

RECORDABLE(sglang_bf16_linear)
