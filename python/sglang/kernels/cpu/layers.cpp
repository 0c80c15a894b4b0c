// What a transformer computes between its products, row by row: embedding, norms, gates, angles, the best token.
//
// Types: 0 float32, 1 bfloat16. Sums and transcendental functions are in float32; a bfloat16 result is rounded where
// torch's sequence of operators rounds it. A row's bits depend on that row alone.
#include <cerrno>
#include <type_traits>

#include "recorded.h"
#include "vector.h"

namespace {

constexpr int64_t THREAD_VALUES = 1 << 15;  // fewer are not worth waking another thread

int useful(int threads, int64_t values) {
  const int64_t most = 1 + values / THREAD_VALUES;
  return static_cast<int>(most < threads ? most : threads);
}

template <class T>
void rms_norm(T* x, const T* residual, const T* weight, T* out, int64_t columns, float eps) {
  if (residual)
    pieces(columns, [&](int64_t i, int64_t n) { store_some(x + i, load_some(x + i, n) + load_some(residual + i, n), n); });
  Vec squares{};
  pieces(columns, [&](int64_t i, int64_t n) {
    const Vec v = load_some(x + i, n);
    squares = fma(v, v, squares);
  });
  const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(columns) + eps);
  pieces(columns, [&](int64_t i, int64_t n) {
    store_some(out + i, load_some(x + i, n) * scale * load_some(weight + i, n), n);
  });
}

template <class T>
void silu_and_mul(const T* x, T* out, int64_t columns) {
  pieces(columns, [&](int64_t i, int64_t n) {
    const Vec gate = load_some(x + i, n), up = load_some(x + columns + i, n);
    store_some(out + i, rounded<T>(gate / (exp(-gate) + 1.0f)) * up, n);
  });
}

// cos [2 * half] and sin likewise, which is negative in its first half, of position * frequencies [half].
template <class T>
void cos_sin(float position, const float* frequencies, int64_t half, float factor, T* cos, T* sin) {
  for (int64_t i = 0; i < half; ++i) {
    const float angle = position * frequencies[i], c = std::cos(angle) * factor, s = std::sin(angle) * factor;
    put(cos + i, c), put(cos + half + i, c);
    put(sin + i, -s), put(sin + half + i, s);
  }
}

template <class From, class To>
void copy_row(const From* from, To* to, int64_t columns) {
  pieces(columns, [&](int64_t i, int64_t n) { store_some(to + i, load_some(from + i, n), n); });
}

template <class F>
void with_type(int dtype, F f) {
  if (dtype == 0)
    f(static_cast<float*>(nullptr));
  else
    f(static_cast<Bf16*>(nullptr));
}

}  // namespace

// Row (i, j) of x starts at i * outer_stride + j * inner_stride; rows of residual (or null) and out are contiguous.
// With a residual, x becomes x + residual before it is normalised.
extern "C" void sglang_rms_norm(void* x, const void* residual, const void* weight, void* out, int64_t outer,
                                int64_t inner, int64_t outer_stride, int64_t inner_stride, int64_t columns, float eps,
                                int dtype, int threads) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    threads = useful(threads, outer * inner * columns);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < outer * inner; ++row)
      rms_norm(static_cast<T*>(x) + row / inner * outer_stride + row % inner * inner_stride,
               residual ? static_cast<const T*>(residual) + row * columns : nullptr, static_cast<const T*>(weight),
               static_cast<T*>(out) + row * columns, columns, eps);
  });
}

// x [rows][2 * columns], rows x_stride apart; out [rows][columns].
extern "C" void sglang_silu_and_mul(const void* x, int64_t x_stride, void* out, int64_t rows, int64_t columns,
                                    int dtype, int threads) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    threads = useful(threads, rows * columns);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row)
      silu_and_mul(static_cast<const T*>(x) + row * x_stride, static_cast<T*>(out) + row * columns, columns);
  });
}

// cos and sin [rows][2 * half] of positions [rows] times frequencies, which lie `stride` apart (0: the same for all).
extern "C" void sglang_cos_sin(const int64_t* positions, const float* frequencies, int64_t stride, void* cos, void* sin,
                               int64_t rows, int64_t half, float factor, int dtype, int threads) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    threads = useful(threads, rows * half * 32);  // a cosine and a sine take as long as so many values
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row)
      cos_sin(static_cast<float>(positions[row]), frequencies + row * stride, half, factor,
              static_cast<T*>(cos) + row * 2 * half, static_cast<T*>(sin) + row * 2 * half);
  });
}

// out [rows][columns] = rows ids of weight [vocabulary][columns]. Returns 0, or EINVAL for an id outside of it.
extern "C" int sglang_embedding(const int64_t* ids, const void* weight, void* out, int64_t rows, int64_t columns,
                                int64_t vocabulary, int weight_dtype, int dtype, int threads) {
  for (int64_t row = 0; row < rows; ++row)
    if (ids[row] < 0 || ids[row] >= vocabulary) return EINVAL;
  with_type(weight_dtype, [&](auto* stored) {
    with_type(dtype, [&](auto* type) {
      using From = std::remove_pointer_t<decltype(stored)>;
      using To = std::remove_pointer_t<decltype(type)>;
      threads = useful(threads, rows * columns);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
      for (int64_t row = 0; row < rows; ++row)
        copy_row(static_cast<const From*>(weight) + ids[row] * columns, static_cast<To*>(out) + row * columns, columns);
    });
  });
  return 0;
}

// values[r] = the largest of x [rows][columns], NaN if one of them is; ids[r] = the first that is as large, `broken` where
// that is NaN or infinite, `impossible` where it is -infinity.
extern "C" void sglang_greedy(const float* x, int64_t x_stride, float* values, int64_t* ids, int64_t rows, int64_t columns,
                              int broken, int impossible, int threads) {
  threads = useful(threads, rows * columns);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = x + row * x_stride;
    Vec best = splat(-INFINITY);
    Ints nan{};
    pieces(columns, [&](int64_t i, int64_t n) {
      const Vec v = n == LANES ? load(from + i) : load(from + i, n);
      nan |= v != v;
      if (n == LANES) {
        best = larger(v, best);
      } else {
        for (int64_t j = 0; j < n; ++j) best[0] = v[j] > best[0] ? v[j] : best[0];
      }
    });
    bool any = false;
    for (int j = 0; j < LANES; ++j) any |= nan[j] != 0;
    values[row] = any ? NAN : largest(best);
    ids[row] = values[row] == -INFINITY ? impossible : broken;
    if (!std::isfinite(values[row])) continue;
    const Vec wanted = splat(values[row]);
    for (int64_t i = 0; i < columns; i += LANES) {
      const int64_t n = columns - i < LANES ? columns - i : LANES;
      if (n == LANES) {
        Ints found = load(from + i) == wanted;
        bool here = false;
        for (int j = 0; j < LANES; ++j) here |= found[j] != 0;
        if (!here) continue;
      }
      int64_t j = i;
      while (j < i + n && from[j] != values[row]) ++j;
      if (j < i + n) {
        ids[row] = j;
        break;
      }
    }
  }
}

RECORDABLE(sglang_rms_norm)
RECORDABLE(sglang_silu_and_mul)
RECORDABLE(sglang_cos_sin)
RECORDABLE(sglang_embedding)
RECORDABLE(sglang_greedy)
