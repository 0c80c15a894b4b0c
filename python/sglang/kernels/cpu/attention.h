// What the ways to compute an attention share.
#pragma once

#include <algorithm>

#include "vector.h"

namespace {

constexpr int TILE = 64;  // keys whose scores are computed before their values are read

struct Call {
  const void *q, *k, *v;  // [tokens][heads or kv_heads][dim], tokens a stride apart
  int64_t q_stride, k_stride, v_stride;
  const void *cos, *sin;  // [tokens][dim]; sin is negative in the first half. null: nothing is rotated
  void *key_cache, *value_cache;  // [slots][kv_heads][dim]
  const int64_t* slots;           // [tokens], where k and v go
  const int32_t* table;           // the slot of position p of row r is table[r * table_stride + p]
  int64_t table_stride;
  const int64_t *rows, *lengths, *news;  // [requests]; a request's new tokens are its last
  void* out;                             // [tokens][heads][dim]
  int64_t requests, heads, kv_heads, dim, window;  // window 0: none
  float scaling, k_scale, v_scale;
};

struct Item {
  int64_t request, token, count;  // new tokens of the batch: token .. token + count - 1
  int64_t position;               // of the first of them in its request
  int64_t begin, end;             // keys
  int64_t kv_head;
  int64_t partial, pieces;  // where the result goes if there are several pieces
};

// Hands f(index, vector, count) a head as it is, or with each value of its first half rotated with that of its second.
template <class T, class F>
void rotated_head(const Call& c, const T* head, int64_t token, F f) {
  if (!c.cos) {
    pieces(c.dim, [&](int64_t i, int64_t n) { f(i, load_some(head + i, n), n); });
    return;
  }
  const int64_t half = c.dim / 2;
  const T *cos = static_cast<const T*>(c.cos) + token * c.dim, *sin = static_cast<const T*>(c.sin) + token * c.dim;
  pieces(half, [&](int64_t i, int64_t n) {
    const Vec a = load_some(head + i, n), b = load_some(head + half + i, n);
    const Vec first = rounded<T>(a * load_some(cos + i, n)), second = rounded<T>(b * load_some(cos + half + i, n));
    f(i, rounded<T>(fma(b, load_some(sin + i, n), first)), n);
    f(half + i, rounded<T>(fma(a, load_some(sin + half + i, n), second)), n);
  });
}

// A token's heads lie beside each other, so that those of one KV head are read in jumps.
template <class T>
void prefetch(const T* p, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(p + i);
}

// Where the cache has the keys and values of `count` positions from `at` on.
template <class Cached>
void locate(const Call& c, const Item& item, int64_t at, int count, const Cached** keys, const Cached** values) {
  const int32_t* slots = c.table + c.rows[item.request] * c.table_stride;
  for (int j = 0; j < count; ++j) {
    const int64_t offset = (slots[at + j] * c.kv_heads + item.kv_head) * c.dim;
    keys[j] = static_cast<const Cached*>(c.key_cache) + offset;
    values[j] = static_cast<const Cached*>(c.value_cache) + offset;
    prefetch(keys[j], c.dim);
    prefetch(values[j], c.dim);
  }
}

}  // namespace
