// Causal attention that rotates queries and keys, writes keys and values to the paged KV cache and reads them there.
//
// Work is cut into items: a request, a run of its new tokens, a KV head, and for a single new token a piece of its keys.
// The cuts depend on the request alone, and pieces are joined in their order: neither the rest of the batch nor the
// number of threads changes a bit.
#include <errno.h>
#include <omp.h>

#include <algorithm>
#include <new>
#include <type_traits>
#include <vector>

#include "attention_amx.h"
#include "recorded.h"

namespace {

constexpr int64_t ROWS = 48;         // queries of an item, counting a token once for each head, unless one token has more
constexpr int64_t TILED_ROWS = 192;  // likewise, where tiles take them
constexpr int64_t PIECE = 512;       // keys of an item with one new token
constexpr int64_t THREAD_PRODUCTS = 1 << 14;

// Room for one item.
struct Scratch {
  std::vector<float> q, scores, keys, values, sums, tops, weights;

  Scratch(int64_t rows, int64_t dim)
      : q(rows * dim), scores(rows * TILE), keys(many(rows) ? TILE * dim : 0), values(keys.size()), sums(rows * dim),
        tops(rows), weights(rows) {}

  // Whether several groups of rows read a tile, so that it pays to prepare it: keys [dim][TILE], values in float32.
  static bool many(int64_t rows) { return rows > DOT_ROWS; }
};

// to [dim][TILE] = keys [count][dim]; columns behind count are filled with anything.
template <class T>
void transpose_keys(const T* const* keys, int count, int64_t dim, float* to) {
  for (int j = 0; j < count; j += LANES)
    pieces(dim, [&](int64_t d, int64_t n) {
      Vec rows[LANES];
      UNROLL16 for (int i = 0; i < LANES; ++i) rows[i] = load_some(keys[std::min(j + i, count - 1)] + d, n);
      transpose(rows);
      for (int64_t i = 0; i < n; ++i) store(to + (d + i) * TILE + j, rows[i]);
    });
}

// scores [MR][TILE] = q [MR][dim] keys [dim][TILE].
template <int MR>
void score_tile(const float* q, const float* keys, int64_t dim, float* scores) {
  for (int first = 0; first < TILE; first += 4 * LANES) {
    Vec s[MR][4] = {};
    for (int64_t d = 0; d < dim; ++d) {
      Vec a[MR];
      UNROLL for (int i = 0; i < MR; ++i) a[i] = splat(q[i * dim + d]);
      UNROLL for (int c = 0; c < 4; ++c) {
        const Vec k = load(keys + d * TILE + first + c * LANES);
        UNROLL for (int i = 0; i < MR; ++i) s[i][c] = fma(a[i], k, s[i][c]);
      }
    }
    UNROLL for (int i = 0; i < MR; ++i)
      UNROLL for (int c = 0; c < 4; ++c) store(scores + i * TILE + first + c * LANES, s[i][c]);
  }
}

template <int MR, class T>
void score_rows(const float* q, const T* const* keys, int count, int64_t dim, float* scores) {
  const float* a[MR];
  for (int i = 0; i < MR; ++i) a[i] = q + i * dim;
  for (int j = 0; j < count; j += 4) {
    const T* b[4];
    float found[MR][4];
    for (int n = 0; n < 4; ++n) b[n] = keys[std::min(j + n, count - 1)];
    dots<MR>(a, b, dim, found);
    for (int i = 0; i < MR; ++i) memcpy(scores + i * TILE + j, found[i], sizeof found[i]);
  }
}

// sums[i] += weights[i] . values, for MR rows of sums.
template <int MR, class T>
void add_values(const float* weights, const T* const* values, int count, int64_t dim, float* sums) {
  int64_t d = 0;
  for (; d + 4 * LANES <= dim; d += 4 * LANES) {
    Vec s[MR][4];
    UNROLL for (int i = 0; i < MR; ++i) UNROLL for (int c = 0; c < 4; ++c) s[i][c] = load(sums + i * dim + d + c * LANES);
    for (int j = 0; j < count; ++j) {
      Vec w[MR];
      UNROLL for (int i = 0; i < MR; ++i) w[i] = splat(weights[i * TILE + j]);
      UNROLL for (int c = 0; c < 4; ++c) {
        const Vec v = load(values[j] + d + c * LANES);
        UNROLL for (int i = 0; i < MR; ++i) s[i][c] = fma(w[i], v, s[i][c]);
      }
    }
    UNROLL for (int i = 0; i < MR; ++i) UNROLL for (int c = 0; c < 4; ++c) store(sums + i * dim + d + c * LANES, s[i][c]);
  }
  pieces(dim - d, [&](int64_t at, int64_t n) {
    Vec s[MR];
    for (int i = 0; i < MR; ++i) s[i] = load_some(sums + i * dim + d + at, n);
    for (int j = 0; j < count; ++j) {
      const Vec v = load_some(values[j] + d + at, n);
      for (int i = 0; i < MR; ++i) s[i] = fma(splat(weights[i * TILE + j]), v, s[i]);
    }
    for (int i = 0; i < MR; ++i) store_some(sums + i * dim + d + at, s[i], n);
  });
}

// f(an integral constant, first row) for rows in groups of at most DOT_ROWS.
template <class F>
void grouped(int64_t rows, F f) {
  for (int64_t row = 0; row < rows;) {
    switch (std::min<int64_t>(rows - row, DOT_ROWS)) {
#if defined(__AVX512F__)
      case 6: f(std::integral_constant<int, 6>{}, row), row += 6; break;
      case 5: f(std::integral_constant<int, 5>{}, row), row += 5; break;
      case 4: f(std::integral_constant<int, 4>{}, row), row += 4; break;
#endif
      case 3: f(std::integral_constant<int, 3>{}, row), row += 3; break;
      case 2: f(std::integral_constant<int, 2>{}, row), row += 2; break;
      default: f(std::integral_constant<int, 1>{}, row), row += 1;
    }
  }
}

// Scores of one tile of keys to the weights of its values; sums are brought to the new largest score.
inline void softmax_tile(float* scores, int64_t begin, int64_t end, float scale, float& top, float& weight,
                         float* sums, int64_t dim) {
  const Vec none = splat(-INFINITY);
  const Ints lanes = lane_numbers();
  Vec best = none;
  for (int j = 0; j < TILE; j += LANES) {
    Vec s = load(scores + j) * scale;
    if (j < begin || j + LANES > end) {
      const int first = static_cast<int>(std::max<int64_t>(begin - j, 0)), behind = static_cast<int>(end - j);
      s = select((lanes >= first) & (lanes < behind), s, none);
    }
    store(scores + j, s);
    best = larger(s, best);
  }
  const float new_top = std::max(top, largest(best));
  const float subtracted = new_top == -INFINITY ? 0.0f : new_top;
  Vec total{};
  for (int j = 0; j < TILE; j += LANES) {
    const Vec p = exp(load(scores + j) - subtracted);
    store(scores + j, p);
    total += p;
  }
  if (top == -INFINITY) {
    top = new_top;  // nothing was added yet
  } else if (top != new_top) {
    const float factor = exp(splat(top - subtracted))[0];
    weight *= factor;
    pieces(dim, [&](int64_t d, int64_t n) { store_some(sums + d, load_some(sums + d, n) * factor, n); });
    top = new_top;
  }
  weight += sum(total);
}

// Scores of a tile of `count` keys from `at` on, and the values that they weigh.
template <class T>
void multiply_tile(const Call& c, const Item& item, Scratch& s, const T* const* keys, const T* const* values, int64_t at,
                   int count) {
  const int64_t group = c.heads / c.kv_heads, rows = item.count * group;
  const bool many = Scratch::many(rows);
  if (many) {
    transpose_keys(keys, count, c.dim, s.keys.data());
    for (int j = 0; j < count; ++j)
      pieces(c.dim, [&](int64_t d, int64_t n) { store_some(&s.values[j * c.dim + d], load_some(values[j] + d, n), n); });
  }
  grouped(rows, [&](auto height, int64_t row) {
    const float* q = &s.q[row * c.dim];
    float* scores = &s.scores[row * TILE];
    if (many)
      score_tile<height.value>(q, s.keys.data(), c.dim, scores);
    else
      score_rows<height.value>(q, keys, count, c.dim, scores);
  });
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t position = item.position + row / group;
    const int64_t first = c.window ? std::max<int64_t>(0, position - c.window + 1) : 0;
    softmax_tile(&s.scores[row * TILE], first - at, std::min<int64_t>(position + 1 - at, count), c.scaling * c.k_scale,
                 s.tops[row], s.weights[row], &s.sums[row * c.dim], c.dim);
  }
  const float* wide[TILE];
  for (int j = 0; j < count; ++j) wide[j] = &s.values[j * c.dim];
  grouped(rows, [&](auto height, int64_t row) {
    const float* weights = &s.scores[row * TILE];
    float* sums = &s.sums[row * c.dim];
    if (many)
      add_values<height.value>(weights, wide, count, c.dim, sums);
    else
      add_values<height.value>(weights, values, count, c.dim, sums);
  });
}

template <class T>
void write_rows(const Call& c, const Item& item, const Scratch& s) {
  const int64_t group = c.heads / c.kv_heads;
  for (int64_t row = 0; row < item.count * group; ++row) {
    T* to = static_cast<T*>(c.out) + ((item.token + row / group) * c.heads + item.kv_head * group + row % group) * c.dim;
    const float factor = c.v_scale / s.weights[row];
    pieces(c.dim, [&](int64_t d, int64_t n) { store_some(to + d, load_some(&s.sums[row * c.dim + d], n) * factor, n); });
  }
}

// A row of partial results: the sums of values, the largest score, the sum of weights.
int64_t partial_size(const Call& c) { return c.heads / c.kv_heads * (c.dim + 2); }

// Whether an item with so many new tokens is computed on tiles.
template <class T, class Cached>
bool tiled(const Call& c, int64_t count) {
  return tiles_take<T, Cached>() && c.dim % 32 == 0 && count > 1 && count * (c.heads / c.kv_heads) > DOT_ROWS;
}

template <class T, class Cached>
void attend(const Call& c, const Item& item, Scratch& s, float* partials) {
#if defined(__AMX_BF16__)
  if constexpr (tiles_take<T, Cached>())
    if (tiled<T, Cached>(c, item.count)) return TiledItem(c, item).attend<Cached>();
#endif
  const int64_t group = c.heads / c.kv_heads, rows = item.count * group;
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = static_cast<const T*>(c.q) + (item.token + row / group) * c.q_stride +
                    (item.kv_head * group + row % group) * c.dim;
    rotated_head(c, from, item.token + row / group,
                 [&](int64_t d, Vec v, int64_t n) { store_some(&s.q[row * c.dim + d], v, n); });
  }
  std::fill_n(s.sums.begin(), rows * c.dim, 0.0f);
  std::fill_n(s.tops.begin(), rows, -INFINITY);
  std::fill_n(s.weights.begin(), rows, 0.0f);
  for (int64_t at = item.begin; at < item.end; at += TILE) {
    const int count = static_cast<int>(std::min<int64_t>(TILE, item.end - at));
    const Cached *keys[TILE], *values[TILE];
    locate(c, item, at, count, keys, values);
    multiply_tile(c, item, s, keys, values, at, count);
  }
  if (item.pieces == 1) {
    write_rows<T>(c, item, s);
    return;
  }
  float* to = partials + item.partial * partial_size(c);
  std::copy_n(s.sums.begin(), rows * c.dim, to);
  std::copy_n(s.tops.begin(), rows, to + rows * c.dim);
  std::copy_n(s.weights.begin(), rows, to + rows * c.dim + rows);
}

// The pieces of a request's KV head, from that of `item` on.
template <class T>
void join(const Call& c, const Item& item, Scratch& s, const float* partials) {
  const int64_t group = c.heads / c.kv_heads, size = partial_size(c);
  const float* from = partials + item.partial * size;
  for (int64_t row = 0; row < group; ++row) {
    float top = -INFINITY;
    for (int64_t p = 0; p < item.pieces; ++p) top = std::max(top, from[p * size + group * c.dim + row]);
    s.weights[row] = 0.0f;
    std::fill_n(s.sums.begin() + row * c.dim, c.dim, 0.0f);
    for (int64_t p = 0; p < item.pieces; ++p) {
      const float* piece = from + p * size;
      const float factor = exp(splat(piece[group * c.dim + row] - top))[0];
      s.weights[row] += factor * piece[group * c.dim + group + row];
      pieces(c.dim, [&](int64_t d, int64_t n) {
        float* sums = &s.sums[row * c.dim + d];
        store_some(sums, fma(splat(factor), load_some(piece + row * c.dim + d, n), load_some(sums, n)), n);
      });
    }
  }
  write_rows<T>(c, item, s);
}

template <class T, class Cached>
void store_new(const Call& c, int64_t token) {
  const T *k = static_cast<const T*>(c.k) + token * c.k_stride, *v = static_cast<const T*>(c.v) + token * c.v_stride;
  const int64_t size = c.kv_heads * c.dim, slot = c.slots[token] * size;
  auto put_at = [](void* cache, int64_t i, Vec values, float scale, int64_t n) {
    store_some(static_cast<Cached*>(cache) + i, std::is_same<Cached, E4m3>::value ? values / splat(scale) : values, n);
  };
  for (int64_t head = 0; head < size; head += c.dim)
    rotated_head(c, k + head, token,
                 [&](int64_t d, Vec a, int64_t n) { put_at(c.key_cache, slot + head + d, a, c.k_scale, n); });
  pieces(size, [&](int64_t i, int64_t n) { put_at(c.value_cache, slot + i, load_some(v + i, n), c.v_scale, n); });
}

template <class T, class Cached>
void run(const Call& c, int threads) {
  const int64_t group = c.heads / c.kv_heads;
  std::vector<Item> items;
  int64_t token = 0, partials = 0, products = 0, height = 0;
  for (int64_t r = 0; r < c.requests; ++r) {
    const int64_t length = c.lengths[r], count = c.news[r];
    const int64_t most = std::max<int64_t>(1, (tiled<T, Cached>(c, count) ? TILED_ROWS : ROWS) / group);
    for (int64_t t = 0; t < count; t += most) {
      const int64_t queries = std::min(most, count - t), position = length - count + t, end = position + queries;
      const int64_t begin = c.window ? std::max<int64_t>(0, position - c.window + 1) : 0;
      const int64_t pieces = count == 1 ? (end - begin + PIECE - 1) / PIECE : 1;
      const int64_t size = pieces == 1 ? end - begin : PIECE;
      if (!tiled<T, Cached>(c, queries)) height = std::max(height, queries * group);
      products += queries * c.heads * (end - begin) * c.dim;
      for (int64_t head = 0; head < c.kv_heads; ++head, partials += pieces > 1 ? pieces : 0)
        for (int64_t p = 0; p < pieces; ++p)
          items.push_back({r, token + t, queries, position, begin + p * size, std::min(end, begin + (p + 1) * size), head,
                           partials + p, pieces});
    }
    token += count;
  }
  std::vector<float> partial(partials * partial_size(c));
  threads = static_cast<int>(std::min<int64_t>(threads, 1 + products / THREAD_PRODUCTS));
  std::vector<Scratch> scratches(threads, Scratch(height, c.dim));
  const int64_t count = static_cast<int64_t>(items.size());
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < token; ++t) store_new<T, Cached>(c, t);
    // The last queries of a long prompt have the most keys: they start first.
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < count; ++i)
      attend<T, Cached>(c, items[count - 1 - i], scratches[omp_get_thread_num()], partial.data());
    if (partials) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < count; ++i)
        if (items[i].pieces > 1 && (i == 0 || items[i - 1].request != items[i].request ||
                                    items[i - 1].kv_head != items[i].kv_head))
          join<T>(c, items[i], scratches[omp_get_thread_num()], partial.data());
    }
  }
}

}  // namespace

// Writes k and v to their slots, then attends. dtype of q, k, v, cos, sin and out: 0 float32, 1 bfloat16; of the cache
// also 2 e4m3, whose values are multiplied by k_scale and v_scale. Returns 0, or ENOMEM.
extern "C" int sglang_attention(const void* q, const void* k, const void* v, int64_t q_stride, int64_t k_stride,
                                int64_t v_stride, const void* cos, const void* sin, void* key_cache, void* value_cache,
                                const int64_t* slots, const int32_t* table, int64_t table_stride, const int64_t* rows,
                                const int64_t* lengths, const int64_t* news, void* out, int64_t requests, int64_t heads,
                                int64_t kv_heads, int64_t dim, int64_t window, float scaling, float k_scale,
                                float v_scale, int dtype, int cache_dtype, int threads) {
  const Call c{q,     k,     v,            q_stride, k_stride, v_stride, cos,  sin, key_cache, value_cache,
               slots, table, table_stride, rows,     lengths,  news,     out,  requests, heads, kv_heads,
               dim,   window, scaling,     k_scale,  v_scale};
  using Run = void (*)(const Call&, int);
  static constexpr Run RUNS[2][3] = {{run<float, float>, run<float, Bf16>, run<float, E4m3>},
                                     {run<Bf16, float>, run<Bf16, Bf16>, run<Bf16, E4m3>}};
  try {
    RUNS[dtype][cache_dtype](c, threads);
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  }
  return 0;
}

RECORDABLE(sglang_attention)
