// Attention of several tokens in bfloat16 on AMX.
//
// 64 keys meet 16 queries at a time (a token counts once for each head). Queries lie side by side in vectors:
//   scores [key][query] = K [key][dim] Q' [dim][query]      sums [dim][query] += V' [dim][key] P [key][query]
// so that neither the softmax nor what it scales adds up within a vector. Sums are in float32; a weight of P is the sum of
// two bfloat16 numbers, within 2^-14 of it.
#pragma once

#include <type_traits>
#include <vector>

#include "amx.h"
#include "attention.h"

namespace {

// Whether this build has tiles for these types; the dimension must be a multiple of 32.
template <class T, class Cached>
constexpr bool tiles_take() {
#if defined(__AMX_BF16__)
  return std::is_same<T, Bf16>::value && !std::is_same<Cached, float>::value;
#else
  return false;
#endif
}

#if defined(__AMX_BF16__)

class TiledItem {
 public:
  TiledItem(const Call& c, const Item& item)
      : c(c), item(item), group(c.heads / c.kv_heads), rows(item.count * group), sets((rows + QUERIES - 1) / QUERIES),
        queries(sets * c.dim / 2), keys(TILE * c.dim / PAIRS), values(keys.size()), scores(TILE), high(TILE / 2),
        low(TILE / 2), sums(sets * c.dim), tops(sets, splat(-INFINITY)), weights(sets), positions(sets) {}

  template <class Cached>
  void attend() {
    const TileConfig config;
    _tile_loadconfig(&config);
    load_queries();
    for (int64_t at = item.begin; at < item.end; at += TILE) {
      const int count = static_cast<int>(std::min<int64_t>(TILE, item.end - at));
      const Cached *found_keys[TILE], *found_values[TILE];
      locate(c, item, at, count, found_keys, found_values);
      load_keys(found_keys, count);
      load_values(found_values, count);
      before_tiles_read();
      for (int64_t set = 0; set < sets; ++set) {
        multiply_keys(set);
        softmax(set, at, count);
        before_tiles_read();
        int64_t d = 0;
        for (; d + 64 <= c.dim; d += 64) multiply_values<4>(set, d);
        if (d < c.dim) multiply_values<2>(set, d);
      }
    }
    _tile_release();
    write_rows();
  }

 private:
  static constexpr int QUERIES = LANES, PAIRS = 2 * LANES;  // PAIRS: bfloat16 numbers of a row of a tile
  static constexpr int64_t ROW = sizeof(Vec);

  const Call& c;
  const Item& item;
  const int64_t group, rows, sets;  // a set: 16 queries
  std::vector<Vec> queries;         // bfloat16 [set][dim / 2][16 queries][2]
  std::vector<Vec> keys;            // bfloat16 [64][dim]
  std::vector<Vec> values;          // bfloat16 [dim][64]
  std::vector<Vec> scores;          // [64][16 queries]
  std::vector<Vec> high, low;       // bfloat16 parts of the weights of values, [32][16 queries][2]
  std::vector<Vec> sums;            // [set][dim][16 queries]
  std::vector<Vec> tops, weights;   // [set][16 queries]: the largest score and the sum of weights, so far
  std::vector<Ints> positions;      // [set][16 queries]

  void load_queries() {
    std::vector<Bf16> lines(QUERIES * c.dim);
    for (int64_t set = 0; set < sets; ++set) {
      for (int64_t i = 0; i < QUERIES; ++i) {
        const int64_t row = std::min(set * QUERIES + i, rows - 1), token = item.token + row / group;
        const Bf16* from = static_cast<const Bf16*>(c.q) + token * c.q_stride +
                           (item.kv_head * group + row % group) * c.dim;
        rotated_head(c, from, token, [&](int64_t d, Vec v, int64_t n) { store_some(&lines[i * c.dim + d], v, n); });
        positions[set][i] = static_cast<int32_t>(item.position + row / group);
      }
      for (int64_t d = 0; d < c.dim; d += PAIRS) {
        Vec block[QUERIES];
        UNROLL16 for (int i = 0; i < QUERIES; ++i) memcpy(&block[i], &lines[i * c.dim + d], ROW);
        transpose(block);
        UNROLL16 for (int i = 0; i < QUERIES; ++i) queries[(set * c.dim + d) / 2 + i] = block[i];
      }
    }
  }

  template <class Cached>
  void load_keys(const Cached* const* from, int count) {
    Bf16* to = reinterpret_cast<Bf16*>(keys.data());
    for (int j = 0; j < TILE; ++j)
      for (int64_t d = 0; d < c.dim; d += LANES) store(to + j * c.dim + d, j < count ? load(from[j] + d) : Vec{});
  }

  template <class Cached>
  void load_values(const Cached* const* from, int count) {
    for (int half = 0; half < 2; ++half)
      for (int64_t d = 0; d < c.dim; d += LANES) {
        Vec block[LANES];
        UNROLL16 for (int i = 0; i < LANES; ++i) {
          const int j = half * PAIRS + 2 * i;
          block[i] = pair(j < count ? load(from[j] + d) : Vec{}, j + 1 < count ? load(from[j + 1] + d) : Vec{});
        }
        transpose(block);
        UNROLL16 for (int i = 0; i < LANES; ++i) values[2 * (d + i) + half] = block[i];
      }
  }

  // The upper halves of a's and b's numbers.
  static Vec pair(Vec a, Vec b) { return floats_of(bits_of(a) >> 16 | (bits_of(b) & 0xFFFF0000u)); }

  // Scores of all keys: tiles 0 to 3.
  void multiply_keys(int64_t set) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const int64_t stride = 2 * c.dim;
    for (int64_t d = 0; d < c.dim; d += PAIRS) {
      const char* k = reinterpret_cast<const char*>(keys.data()) + 2 * d;
      _tile_loadd(6, &queries[(set * c.dim + d) / 2], ROW);
      _tile_loadd(4, k, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, k + 16 * stride, stride);
      _tile_dpbf16ps(1, 5, 6);
      _tile_loadd(4, k + 32 * stride, stride);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(5, k + 48 * stride, stride);
      _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, &scores[0], ROW);
    _tile_stored(1, &scores[16], ROW);
    _tile_stored(2, &scores[32], ROW);
    _tile_stored(3, &scores[48], ROW);
  }

  // Scores to weights; the sums are brought to the new largest score.
  void softmax(int64_t set, int64_t at, int count) {
    const Vec none = splat(-INFINITY), scale = splat(c.scaling * c.k_scale);
    const int64_t last = item.position + item.count - 1;
    const bool all = count == TILE && at + TILE - 1 <= item.position && (!c.window || at > last - c.window);
    Vec best = none;
    for (int j = 0; j < TILE; ++j) {
      Vec s = scores[j] * scale;
      if (!all) {
        const Ints behind = positions[set] - static_cast<int32_t>(at + j);  // how far the key is behind the query
        Ints seen = behind >= 0;
        if (c.window) seen &= behind < static_cast<int32_t>(c.window);
        s = j < count ? select(seen, s, none) : none;
      }
      scores[j] = s;
      best = larger(s, best);
    }
    const Vec top = larger(tops[set], best), subtracted = select(top == none, Vec{}, top);
    const Vec factor = exp(tops[set] - subtracted);
    tops[set] = top;
    Vec total{};
    for (int j = 0; j < TILE; j += 2) {
      const Vec a = exp(scores[j] - subtracted), b = exp(scores[j + 1] - subtracted);
      total += a + b;
      high[j / 2] = pair(a, b);
      low[j / 2] = pair(a - upper(a), b - upper(b));
    }
    weights[set] = fma(weights[set], factor, total);
    if (_mm512_cmp_ps_mask(factor, splat(1.0f), _CMP_NEQ_UQ))
      for (int64_t d = 0; d < c.dim; ++d) sums[set * c.dim + d] *= factor;
  }

  static Vec upper(Vec v) { return floats_of(bits_of(v) & 0xFFFF0000u); }

  // 16 * COUNT dimensions, from d on, of the sums: tiles 0 to COUNT - 1.
  template <int COUNT>
  void multiply_values(int64_t set, int64_t d) {
    Vec* sum = &sums[set * c.dim + d];
#define EACH(F)                   \
  F(0, 4) F(1, 5)                 \
  if constexpr (COUNT == 4) {     \
    F(2, 4) F(3, 5)               \
  }
#define LOAD(C, A) _tile_loadd(C, sum + 16 * C, ROW);
#define MULTIPLY(C, A)                                        \
  _tile_loadd(A, &values[2 * (d + 16 * C) + half], 2 * ROW);  \
  _tile_dpbf16ps(C, A, 6);                                    \
  _tile_dpbf16ps(C, A, 7);
#define STORE(C, A) _tile_stored(C, sum + 16 * C, ROW);
    EACH(LOAD)
    for (int half = 0; half < 2; ++half) {
      _tile_loadd(6, &high[16 * half], ROW);
      _tile_loadd(7, &low[16 * half], ROW);
      EACH(MULTIPLY)
    }
    EACH(STORE)
#undef EACH
#undef LOAD
#undef MULTIPLY
#undef STORE
  }

  void write_rows() {
    for (int64_t set = 0; set < sets; ++set) {
      const Vec factor = c.v_scale / weights[set];
      for (int64_t d = 0; d < c.dim; d += LANES) {
        Vec block[LANES];
        UNROLL16 for (int i = 0; i < LANES; ++i) block[i] = sums[set * c.dim + d + i] * factor;
        transpose(block);
        for (int64_t row = set * QUERIES; row < std::min(rows, (set + 1) * QUERIES); ++row)
          store(static_cast<Bf16*>(c.out) +
                    ((item.token + row / group) * c.heads + item.kv_head * group + row % group) * c.dim + d,
                block[row % QUERIES]);
      }
    }
  }
};

#endif

}  // namespace
