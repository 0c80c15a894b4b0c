// Attention of one new token per request over the paged KV cache, with its rotation and the write of its key and value
// to the cache. What changes from step to step, lengths above all, is read on the device, so a captured launch fits
// every step. pdl.cuh and values.cuh are put in front of it.
//
// Of each request, blockIdx.y, `splits` blocks share a KV head; as many of them work as its length asks for, each on a
// share of its tokens, and the one that ends last merges what they found. Those with a share have the lower numbers:
// multiprocessors take blocks in turn. A warp takes TILE tokens at a time and all GROUP query heads that read them: two
// products of tensor cores (mma.m16n8k16) whose first operand comes straight from memory. Lane 4 row + column holds
//   of keys [16 tokens, values]: tokens row and row + 8, of each 32 values the 8 from 8 column on, so the values of a
//     product are a permutation that the queries [values, 8 heads] follow;
//   of scores [16 tokens, 8 heads]: tokens row and row + 8, heads 2 column and 2 column + 1;
//   of values, transposed [values, 16 tokens]: tokens 2 column + {0, 1, 8, 9}, of each 64 values the 8 from 8 row on;
//   of sums [values, 8 heads]: the same values, heads 2 column and 2 column + 1.
// Value d of a head is rotated with d + DIM / 2, which the same lane holds.
//
// A request's newest token is in its last tile, which one warp has: it writes the key and value first. If that tile is
// its first one, it has read the slot before, and puts them in the place of what it found; else it reads them like all
// others. No other warp reads that slot, since tiles before the last one are full. What pads a batch may repeat a
// request: both then write the same bytes, each before it reads them.
//
// Macros: TYPE (of queries and output; 0: bfloat16, 1: float16), E4M3 (the cache; else TYPE), DIM (a multiple of 64),
// GROUP (query heads of a KV head, 1 to 8), BLOCKS (per multiprocessor).
#define TILE 16
#define WARPS 4
#define THREADS (32 * WARPS)
#define MULTIPLIES_HALF (TYPE == 1 || E4M3) // what tensor cores get is float16, else bfloat16
#define FAR_AHEAD (DIM <= 128)              // the next tile is loaded while this one is computed: registers suffice
#define INFINITE __uint_as_float(0x7F800000u)
#if E4M3 && __CUDA_ARCH__ < 890
#define UNIT 256.f // of what tensor cores get of the cache: the exponents' biases are 7 and 15
#else
#define UNIT 1.f
#endif

#if E4M3
typedef u8 Stored;
typedef uint2 Raw; // 8 values
#else
typedef u16 Stored;
typedef uint4 Raw;
#endif

struct DecodeParams {
  const u16 *q;                   // [requests, kv_heads * GROUP, DIM], at multiples of q_stride and q_head_stride
  const u16 *k, *v;               // the new tokens' rows of [kv_heads, DIM] at multiples of k_stride and v_stride;
                                  // null: keys and values have them
  const u16 *cos, *sin;           // [requests, DIM], of which the first half is read: the second has the same cosines
                                  // and the sines negated; null: q and k are rotated already
  Stored *keys, *values;          // rows of [kv_heads, DIM] at multiples of key_stride and value_stride
  const int *table;               // [any, table_stride], slots: rows of keys and values
  const long long *rows, *lengths; // [requests], of the table; at least 1
  u16 *out;                       // [requests, kv_heads, GROUP, DIM]
  float *sums;                    // [requests, kv_heads, splits, GROUP, DIM]
  float2 *found;                  // [requests, kv_heads, splits, GROUP], largest score and sum of weights
  u32 *arrived;                   // [requests, kv_heads], zeros before and after
  int q_stride, q_head_stride, k_stride, v_stride, key_stride, value_stride, table_stride, kv_heads, splits;
  int window;                     // how many tokens are seen, the newest ones
  float scale, k_scale, v_scale;  // of scores as powers of two; of keys in e4m3; of values in e4m3 and of the output
};

// 8 values of TYPE as the cache has them.
__device__ __forceinline__ Raw raw_of(const u32 (&w)[4], float inverse_scale) {
#if E4M3
  const auto four = [&](u32 a, u32 b) {
    return saturated_e4m3(a, inverse_scale) | saturated_e4m3(a >> 16, inverse_scale) << 8 |
           saturated_e4m3(b, inverse_scale) << 16 | (u32)saturated_e4m3(b >> 16, inverse_scale) << 24;
  };
  return {four(w[0], w[1]), four(w[2], w[3])};
#else
  return {w[0], w[1], w[2], w[3]};
#endif
}

// A warp's c [16, 8] += a [16, 16] b [16, 8].
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if MULTIPLIES_HALF
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

__device__ __forceinline__ u32 transpose(u32 v) { // a warp's 8 x 8 values of 16 bits
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

// Adds 1 to a counter, or makes it zero where it was `last`; what it was. What blocks wrote that came before is seen after.
__device__ __forceinline__ u32 arrive(u32 *counter, u32 last) {
  u32 r;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(r) : "l"(counter), "r"(last) : "memory");
  return r;
}

// The e4m3 values of the lower two bytes as float16, divided by UNIT.
__device__ __forceinline__ u32 halves_of(u32 bytes) {
#if __CUDA_ARCH__ >= 890
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((u16)bytes));
  return r;
#else
  const u32 w = __byte_perm(bytes, 0, 0x1404), magnitude = w & 0x7F007F00u;
  const u32 nan = (magnitude + 0x01000100u) & 0x80008000u;
  return (w & 0x80008000u) | magnitude >> 1 | (nan - (nan >> 6));
#endif
}

__device__ __forceinline__ void words_of(u32 (&w)[4], const Raw &raw) { // 8 values as tensor cores take them
#if E4M3
  w[0] = halves_of(raw.x), w[1] = halves_of(raw.x >> 16), w[2] = halves_of(raw.y), w[3] = halves_of(raw.y >> 16);
#else
  w[0] = raw.x, w[1] = raw.y, w[2] = raw.z, w[3] = raw.w;
#endif
}

struct Part { // of some tokens: four sums of weighted values, the largest score, the sum of weights 2^(score - largest)
  float4 sums;
  float most, weight;
};

// Parts 0 to count - 1, in order and AT_ONCE loads in flight.
template <int AT_ONCE, class Load> __device__ __forceinline__ Part merge(int count, Load load) {
  Part all = {{0.f, 0.f, 0.f, 0.f}, -INFINITE, 0.f};
  for (int begin = 0; begin < count; begin += AT_ONCE) {
    Part parts[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) parts[i] = load(min(begin + i, count - 1));
    float most = all.most;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (begin + i >= count) parts[i].most = -INFINITE;
      most = fmaxf(most, parts[i].most);
    }
    const float base = most == -INFINITE ? 0.f : most;
    const float old = exp2f(all.most - base);
    all = {{all.sums.x * old, all.sums.y * old, all.sums.z * old, all.sums.w * old}, most, all.weight * old};
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const float factor = exp2f(parts[i].most - base);
      all.sums.x = fmaf(parts[i].sums.x, factor, all.sums.x);
      all.sums.y = fmaf(parts[i].sums.y, factor, all.sums.y);
      all.sums.z = fmaf(parts[i].sums.z, factor, all.sums.z);
      all.sums.w = fmaf(parts[i].sums.w, factor, all.sums.w);
      all.weight = fmaf(parts[i].weight, factor, all.weight);
    }
  }
  return all;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) decode_attention(const __grid_constant__ DecodeParams p) {
  __shared__ float4 warp_sums[WARPS][GROUP * DIM / 4];
  __shared__ float2 warp_found[WARPS][GROUP];
  __shared__ u32 pair, split, active; // registers are short; active: how many blocks have a share
  __shared__ bool last;
  begin_next_kernel();
  const int lane = threadIdx.x & 31, row = lane / 4, column = lane % 4;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0); // the compiler sees that it is the same in all lanes
  const u32 request = blockIdx.y, kv_head = blockIdx.x % p.kv_heads;
  // In one load: of two, the compiler has the second one wait for what depends on the first.
  const int given = __ldcg((lane % 2 ? p.rows : p.lengths) + request);
  const int length = __shfl_sync(~0u, given, 0);
  const int *const slots = p.table + (long long)__shfl_sync(~0u, given, 1) * p.table_stride;
  const int first = max(0, length - p.window), tiles = (length - first + TILE - 1) / TILE;
  const int share = max((tiles + p.splits - 1) / (u32)p.splits, WARPS); // tiles of a block
  const int begin = blockIdx.x / (u32)p.kv_heads * share, end = min(begin + share, tiles);
  if (begin >= end) return; // other blocks of the request have a share, and wait
  // Of a tile the lane's slot; behind the end it is the last token's, whose weight there is zero.
  const auto slot_of = [&](int tile) { return __ldcg(slots + min(first + tile * TILE + lane % TILE, length - 1)); };
  int tile = begin + warp, slot = slot_of(tile), next_slot = 0;
  if (threadIdx.x == 0) {
    pair = request * p.kv_heads + kv_head;
    split = blockIdx.x / (u32)p.kv_heads;
    active = (tiles + share - 1) / (u32)share;
  }

  const Stored *const my_keys = p.keys + kv_head * DIM + 8 * column;
  const Stored *const my_values = p.values + kv_head * DIM + 8 * row;
  Raw keys[2][DIM / 32], values[4][DIM / 64];
  const auto load_keys = [&](int slot) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const Stored *const from = my_keys + (long long)__shfl_sync(~0u, slot, row + 8 * t) * p.key_stride;
#pragma unroll
      for (int c = 0; c < DIM / 32; ++c) keys[t][c] = __ldcg((const Raw *)(from + 32 * c));
    }
  };
  const auto load_values = [&](int slot) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int token = 2 * column + t % 2 + t / 2 * 8;
      const Stored *const from = my_values + (long long)__shfl_sync(~0u, slot, token) * p.value_stride;
#pragma unroll
      for (int h = 0; h < DIM / 64; ++h) values[t][h] = __ldcg((const Raw *)(from + 64 * h));
    }
  };
  const auto load_first = [&] {
    load_keys(slot);
    if (FAR_AHEAD) load_values(slot);
  };
  uint4 cos[DIM / 64] = {}, sin[DIM / 64] = {};
  if (p.cos) {
    const uint4 *const cosines = (const uint4 *)(p.cos + request * DIM) + column;
    const uint4 *const sines = (const uint4 *)(p.sin + request * DIM) + column;
#pragma unroll
    for (int c = 0; c < DIM / 64; ++c) cos[c] = __ldcg(cosines + 4 * c), sin[c] = __ldcg(sines + 4 * c);
  }
  const bool early = p.k || tile < tiles - 1; // what is read of the cache is there, but for the new token
  if (tile < end && early) load_first();
  wait_for_previous_kernel();

  const auto load = [](u32 (&w)[4], const u16 *from) {
    const uint4 x = *(const uint4 *)from;
    w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
  };
  // The newest token has one warp.
  const bool has_new = p.k && tile < end && end == tiles && (end - 1 - tile) % WARPS == 0;
  u32 new_key[DIM / 32][4], new_value[DIM / 64][4]; // as this lane has them of a tile
  if (has_new) {
    const u16 *const k = p.k + (long long)request * p.k_stride + kv_head * DIM + 8 * column;
    const u16 *const v = p.v + (long long)request * p.v_stride + kv_head * DIM + 8 * row;
#pragma unroll
    for (int c = 0; c < DIM / 32; ++c) load(new_key[c], k + 32 * c);
#pragma unroll
    for (int h = 0; h < DIM / 64; ++h) load(new_value[h], v + 64 * h);
  }
  u32 queries[DIM / 32][4] = {};
  if (row < GROUP) {
    const u16 *const q = p.q + (long long)request * p.q_stride + (kv_head * GROUP + row) * p.q_head_stride + 8 * column;
#pragma unroll
    for (int c = 0; c < DIM / 32; ++c) load(queries[c], q + 32 * c);
  }
  const auto rotate = [&](u32 (&head)[DIM / 32][4]) {
#pragma unroll
    for (int c = 0; c < DIM / 64; ++c) {
      u32(&low)[4] = head[c], (&high)[4] = head[c + DIM / 64];
      rotate_pairs(low[0], high[0], cos[c].x, sin[c].x);
      rotate_pairs(low[1], high[1], cos[c].y, sin[c].y);
      rotate_pairs(low[2], high[2], cos[c].z, sin[c].z);
      rotate_pairs(low[3], high[3], cos[c].w, sin[c].w);
    }
  };
  if (tile < end) {
    if (!early) load_first();
    if (has_new) {
      const int newest = tile == tiles - 1 ? __shfl_sync(~0u, slot, TILE - 1) : slots[length - 1];
      const int token = (length - 1 - first) % TILE; // of its tile, in which those behind it repeat it
      const bool in_first = FAR_AHEAD && tile == tiles - 1;
#pragma unroll
      for (int h = 0; h < DIM / 64; ++h) {
        const Raw stored = raw_of(new_value[h], E4M3 ? 1.f / p.v_scale : 1.f);
        if (column == 0) *(Raw *)(p.values + newest * (long long)p.value_stride + kv_head * DIM + 8 * row + 64 * h) = stored;
#pragma unroll
        for (int t = 0; t < 4; ++t)
          if (in_first && 2 * column + t % 2 + t / 2 * 8 >= token) values[t][h] = stored;
      }
      if (p.cos) rotate(new_key);
#pragma unroll
      for (int c = 0; c < DIM / 32; ++c) {
        const Raw stored = raw_of(new_key[c], E4M3 ? 1.f / p.k_scale : 1.f);
        if (row == 0) *(Raw *)(p.keys + newest * (long long)p.key_stride + kv_head * DIM + 8 * column + 32 * c) = stored;
#pragma unroll
        for (int t = 0; t < 2; ++t)
          if (in_first && row + 8 * t >= token) keys[t][c] = stored;
      }
      __syncwarp(); // later tiles are loaded by other lanes than have stored them
      if (!FAR_AHEAD && tile == tiles - 1) load_keys(slot);
    }
    if (tile + WARPS < end) next_slot = slot_of(tile + WARPS);
    if (p.cos) rotate(queries);
    float scale[2] = {p.scale * UNIT, p.scale * UNIT}; // of this lane's two heads
#if E4M3 && TYPE == 0
    // As float16, each head by the power of two that brings its largest value to between 1 and 2.
    int largest = 0;
#pragma unroll
    for (int c = 0; c < DIM / 32; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        largest = max(largest, max((int)(queries[c][i] & 0x7FFF), (int)(queries[c][i] >> 16 & 0x7FFF)));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    const u32 exponent = min(max(largest >> 7, 1), 253);
    const float down = __uint_as_float(254 - exponent << 23), up = __uint_as_float(exponent << 23);
#pragma unroll
    for (int c = 0; c < DIM / 32; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        queries[c][i] = pair_of<true>(__uint_as_float(queries[c][i] << 16) * down,
                                      __uint_as_float(queries[c][i] & 0xFFFF0000u) * down);
    scale[0] *= __shfl_sync(~0u, up, 8 * column);
    scale[1] *= __shfl_sync(~0u, up, 8 * column + 4);
#endif
    float sums[DIM / 16][4] = {}, most[2] = {-INFINITE, -INFINITE}, weight[2] = {0.f, 0.f};
    for (;; tile += WARPS) {
      const bool more = tile + WARPS < end;
      float even[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int c = 0; c < DIM / 32; ++c) {
        u32 a[4], b[4];
        words_of(a, keys[0][c]);
        words_of(b, keys[1][c]);
        multiply(even, a[0], b[0], a[1], b[1], queries[c][0], queries[c][1]);
        multiply(odd, a[2], b[2], a[3], b[3], queries[c][2], queries[c][3]);
      }
      if (!FAR_AHEAD) load_values(slot);
      if (FAR_AHEAD && more) load_keys(next_slot);

      u32 weights[2]; // as scores, then as tensor cores take them: [16 tokens, 8 heads], tokens 2 column + {0, 1}, {8, 9}
      float p_of[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) { // the lane's heads
        float score[2], largest = most[i];
#pragma unroll
        for (int t = 0; t < 2; ++t) { // and its tokens
          const bool seen = first + tile * TILE + row + 8 * t < length;
          score[t] = seen ? (even[2 * t + i] + odd[2 * t + i]) * scale[i] : -INFINITE;
          largest = fmaxf(largest, score[t]);
        }
#pragma unroll
        for (int o = 4; o < 32; o *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, o));
        const float base = largest == -INFINITE ? 0.f : largest, old = exp2f(most[i] - base);
        most[i] = largest;
        weight[i] *= old;
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          p_of[t][i] = exp2f(score[t] - base);
          weight[i] += p_of[t][i];
        }
#pragma unroll
        for (int d = 0; d < DIM / 16; ++d) sums[d][i] *= old, sums[d][2 + i] *= old;
      }
#pragma unroll
      for (int t = 0; t < 2; ++t) weights[t] = transpose(pair_of<MULTIPLIES_HALF>(p_of[t][0], p_of[t][1]));

#pragma unroll
      for (int h = 0; h < DIM / 64; ++h) {
        u32 w[4][4];
#pragma unroll
        for (int t = 0; t < 4; ++t) words_of(w[t], values[t][h]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          multiply(sums[4 * h + i], __byte_perm(w[0][i], w[1][i], 0x5410), __byte_perm(w[0][i], w[1][i], 0x7632),
                   __byte_perm(w[2][i], w[3][i], 0x5410), __byte_perm(w[2][i], w[3][i], 0x7632), weights[0], weights[1]);
      }
      if (!more) break;
      slot = next_slot;
      if (FAR_AHEAD) load_values(slot);
      else load_keys(slot);
      if (tile + 2 * WARPS < end) next_slot = slot_of(tile + 2 * WARPS);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = 2 * column + i;
#pragma unroll
      for (int o = 4; o < 32; o *= 2) weight[i] += __shfl_xor_sync(~0u, weight[i], o);
      if (head >= GROUP) continue;
      if (row == 0) warp_found[warp][head] = {most[i], weight[i]};
#pragma unroll
      for (int d = 0; d < DIM / 16; d += 2)
        warp_sums[warp][(head * DIM + d / 4 * 64 + 8 * row + d % 4 * 2) / 4] =
            {sums[d][i], sums[d][2 + i], sums[d + 1][i], sums[d + 1][2 + i]};
    }
  }
  __syncthreads();

  const auto finish = [&](int at, const Part &part) {
    const float factor = p.v_scale * UNIT / part.weight;
    uint2 pairs;
    pairs.x = pair_of<TYPE == 1>(part.sums.x * factor, part.sums.y * factor);
    pairs.y = pair_of<TYPE == 1>(part.sums.z * factor, part.sums.w * factor);
    *(uint2 *)(p.out + (long long)pair * GROUP * DIM + 4 * at) = pairs;
  };
  float4 *const all_sums = (float4 *)p.sums + (long long)pair * p.splits * (GROUP * DIM / 4);
  float2 *const all_found = p.found + pair * p.splits * GROUP;
  for (int at = threadIdx.x; at < GROUP * DIM / 4; at += THREADS) { // four values of the output
    const int head = at / (DIM / 4);
    const Part part = merge<WARPS>(min(end - begin, WARPS), [&](int i) {
      return Part{warp_sums[i][at], warp_found[i][head].x, warp_found[i][head].y};
    });
    if (active == 1) {
      finish(at, part);
      continue;
    }
    __stcg(all_sums + split * (GROUP * DIM / 4) + at, part.sums);
    if (at % (DIM / 4) == 0) __stcg(all_found + split * GROUP + head, float2{part.most, part.weight});
  }
  if (active == 1) return;
  __syncthreads();
  if (threadIdx.x == 0) last = arrive(p.arrived + pair, active - 1) == active - 1;
  __syncthreads();
  if (!last) return;
  for (int at = threadIdx.x; at < GROUP * DIM / 4; at += THREADS) {
    const int head = at / (DIM / 4);
    finish(at, merge<16>(active, [&](int i) {
             const float2 found = __ldcg(all_found + i * GROUP + head);
             return Part{__ldcg(all_sums + i * (GROUP * DIM / 4) + at), found.x, found.y};
           }));
  }
}
