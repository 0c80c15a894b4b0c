// Draws a token of each row from the probabilities that top-k, top-p and min-p leave. pdl.cuh is put in front of it.
//
// A block per row, which it reads a few times. Tokens are ordered as the limits want them: by probability, the largest
// first, and equal ones by their number. All three limits keep a prefix of this order, and a draw is where a running sum
// along it exceeds a number. Both are found without sorting, digit by digit of the probability's bits. Sums are of
// integers, so that they are exact and the same whoever adds first: what a row gets depends on the row alone.
struct DrawParams {
  const float *probs;      // [rows, n]
  const long long *top_ks; // [rows], positive; n: no limit
  const float *top_ps;     // [rows]; from 1 on: no limit
  const float *min_ps;     // [rows]; 0: no limit
  const double *noise;     // [rows], in [0, 1]
  long long *ids;          // [rows]
  int n;                   // below 2^30
  int vector;              // rows begin at multiples of 16 bytes
};

#define THREADS 1024
#define LISTED 2048 // tokens that are kept in shared memory when so few are left to look at

struct Shared {
  u64 sums[6][THREADS / 32];
  u32 bits[LISTED], ids[LISTED], listed;
};

// A probability in multiples of 2^-60, rounded down.
__device__ __forceinline__ u64 weight_of(u32 bits) {
  const int shift = (int)(bits >> 23) - 90;
  const u64 mantissa = (bits & 0x7FFFFF) | 0x800000;
  return shift >= 0 ? mantissa << min(shift, 37) : shift > -24 ? mantissa >> -shift : 0;
}

// The sums of all threads' values, in every thread.
template <int N> __device__ __forceinline__ void block_sums(u64 (&v)[N], Shared &s) {
  const int lane = threadIdx.x & 31, warps = blockDim.x / 32;
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v[i] += __shfl_xor_sync(~0u, v[i], o);
    if (lane == 0) s.sums[i][threadIdx.x / 32] = v[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    v[i] = lane < warps ? s.sums[i][lane] : 0;
#pragma unroll
    for (int o = 16; o; o >>= 1) v[i] += __shfl_xor_sync(~0u, v[i], o);
  }
  __syncthreads();
}

struct Row {
  const float *probs;
  int n, vector;
  bool short_list; // only the tokens in shared memory are looked at
};

// see(bits of a probability, token) for this thread's part of the row.
template <class See> __device__ __forceinline__ void each(const Row &row, const Shared &s, See see) {
  if (row.short_list) {
    for (u32 i = threadIdx.x; i < s.listed; i += blockDim.x) see(s.bits[i], s.ids[i]);
    return;
  }
  const int whole = row.vector ? row.n / 4 : 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < whole; i += blockDim.x) {
    const float4 v = ((const float4 *)row.probs)[i];
    see(__float_as_uint(v.x), 4 * i);
    see(__float_as_uint(v.y), 4 * i + 1);
    see(__float_as_uint(v.z), 4 * i + 2);
    see(__float_as_uint(v.w), 4 * i + 3);
  }
  for (int i = 4 * whole + threadIdx.x; i < row.n; i += blockDim.x) see(__float_as_uint(row.probs[i]), i);
}

// Puts the tokens that are wanted into shared memory, at most LISTED.
template <class Wanted> __device__ __forceinline__ void list(Row &row, Shared &s, Wanted wanted) {
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
  each(row, s, [&](u32 bits, u32 id) {
    if (wanted(bits, id)) {
      const u32 at = atomicInc(&s.listed, ~0u);
      s.bits[at] = bits;
      s.ids[at] = id;
    }
  });
  __syncthreads();
  row.short_list = true;
}

// Where a running sum, of the largest keys first, exceeds a target.
struct Place {
  u32 key; // 0 if it never does
  u64 weight_above;
  u64 count_above, count; // tokens with larger keys, and with this one
};

// Keys are below 4 << shift, an even number; a token with key 0 is not looked at. The sum is of weights, or with by_count
// of ones.
template <class Key>
__device__ __forceinline__ Place find(Row row, Shared &s, int shift, u64 target, bool by_count, Key key) {
  u32 base = 0;                            // the place's key is from here
  u64 lower[2] = {0, 0}, upper[2] = {0, 0}; // weight and count from base on (unknown for 0), from base + (4 << shift) on
  u64 lost[2] = {0, 0};                     // of what lies above the list that was made of the row
  for (; shift >= 0; shift -= 2) {
    u64 v[6] = {0, 0, 0, 0, 0, 0}, at[5][2] = {{lower[0], lower[1]}, {0, 0}, {0, 0}, {0, 0}, {upper[0], upper[1]}};
    each(row, s, [&](u32 bits, u32 id) {
      const u32 k = key(bits, id);
#pragma unroll
      for (int i = 0; i < 3; ++i)
        if (k >= base + ((u32)(i + 1) << shift)) {
          v[2 * i] += weight_of(bits);
          ++v[2 * i + 1];
        }
    });
    block_sums(v, s);
    int step = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      at[i + 1][0] = v[2 * i] + lost[0];
      at[i + 1][1] = v[2 * i + 1] + lost[1];
      if (at[i + 1][by_count] > target) step = i + 1;
    }
    base += (u32)step << shift;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i == step) {
        lower[0] = at[i][0], lower[1] = at[i][1];
        upper[0] = at[i + 1][0], upper[1] = at[i + 1][1];
      }
    if (!row.short_list && base && lower[1] - upper[1] <= LISTED && shift) {
      const u32 end = base + (1u << shift);
      list(row, s, [&](u32 bits, u32 id) {
        const u32 k = key(bits, id);
        return k >= base && k < end;
      });
      lost[0] = upper[0], lost[1] = upper[1];
    }
  }
  return {base, upper[0], upper[1], lower[1] - upper[1]};
}

extern "C" __global__ void __launch_bounds__(THREADS) draw_token(const __grid_constant__ DrawParams p) { // blockIdx.x: the row
  __shared__ Shared s;
  begin_next_kernel();
  wait_for_previous_kernel();
  const int at = blockIdx.x;
  Row row = {p.probs + (long long)at * p.n, p.n, p.vector, false};
  const auto by_probability = [](u32 bits, u32) { return bits; };
  u32 last = 0;      // bits of the smallest probability that is kept
  u64 equal = ~0ull; // how many tokens with this one are kept, the first ones
  const auto keep = [&](u32 bits, u64 count) {
    if (bits > last) last = bits, equal = count;
    else if (bits == last && count < equal) equal = count;
  };
  if (p.top_ks[at] < p.n) {
    const u64 target = p.top_ks[at] - 1;
    const Place place = find(row, s, 28, target, true, by_probability);
    if (place.key) keep(place.key, target + 1 - place.count_above);
  }
  if (p.top_ps[at] < 1.f) {
    const u64 target = weight_of(__float_as_uint(p.top_ps[at]));
    const Place place = find(row, s, 28, target, false, by_probability);
    if (place.key) keep(place.key, (target - place.weight_above) / weight_of(place.key) + 1);
  }
  if (p.min_ps[at] > 0.f) {
    const Place largest = find(row, s, 28, 0, true, by_probability);
    keep(__float_as_uint(__fmul_rn(__uint_as_float(largest.key), p.min_ps[at])), ~0ull);
  }
  u64 v[3] = {0, 0, 0};
  each(row, s, [&](u32 bits, u32) {
    v[0] += bits > last ? weight_of(bits) : 0;
    v[1] += bits > last;
    v[2] += bits == last;
  });
  block_sums(v, s);
  if (v[1] + v[2] <= LISTED) list(row, s, [&](u32 bits, u32) { return bits >= last; });
  const u64 total = v[0] + (equal < v[2] ? equal : v[2]) * weight_of(last);
  u64 target = (u64)(p.noise[at] * (double)total);
  if (target >= total) target = total ? total - 1 : 0;
  const Place drawn = find(row, s, 28, target, false, by_probability);
  // Of the tokens with this probability, the one with so many before it.
  const u64 before = drawn.key ? (target - drawn.weight_above) / weight_of(drawn.key) : 0;
  int shift = 0;
  while (p.n >= 4 << shift) shift += 2;
  const Place token = find(row, s, shift, before, true, [&](u32 bits, u32 id) { return bits == drawn.key ? p.n - id : 0; });
  // Without a number among its probabilities a row has no such token.
  if (threadIdx.x == 0) p.ids[at] = token.key ? p.n - token.key : 0;
}
