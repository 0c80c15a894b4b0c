// What a transformer computes between its products, row by row: norms, gates, rotations, the best token.
//
// Types: 0 float32, 1 bfloat16. Sums and transcendental functions are in float32; a bfloat16 result is rounded where
// torch's sequence of operators rounds it. A row's bits depend on that row alone.
#include <type_traits>

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

// Pairs a head's first half with its second half; `sin` is negative in the first.
template <class T>
void rotate(T* x, const T* cos, const T* sin, int64_t dim) {
  const int64_t half = dim / 2;
  pieces(half, [&](int64_t i, int64_t n) {
    const Vec a = load_some(x + i, n), b = load_some(x + half + i, n);
    const Vec first = rounded<T>(a * load_some(cos + i, n)), second = rounded<T>(b * load_some(cos + half + i, n));
    store_some(x + i, fma(b, load_some(sin + i, n), first), n);
    store_some(x + half + i, fma(a, load_some(sin + half + i, n), second), n);
  });
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

// x [tokens][heads][dim] in place, tokens x_stride apart; cos and sin [tokens][dim].
extern "C" void sglang_rotate(void* x, int64_t x_stride, const void* cos, const void* sin, int64_t tokens,
                              int64_t heads, int64_t dim, int dtype, int threads) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    threads = useful(threads, tokens * heads * dim);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < tokens * heads; ++row)
      rotate(static_cast<T*>(x) + row / heads * x_stride + row % heads * dim,
             static_cast<const T*>(cos) + row / heads * dim, static_cast<const T*>(sin) + row / heads * dim, dim);
  });
}

// values[r] = the largest of x [rows][columns], ids[r] = the first that is as large; NaN and 0 if one of them is NaN.
extern "C" void sglang_max(const float* x, int64_t x_stride, float* values, int64_t* ids, int64_t rows, int64_t columns,
                           int threads) {
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
    ids[row] = 0;
    if (any) continue;
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
