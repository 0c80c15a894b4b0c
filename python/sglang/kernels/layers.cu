// What a transformer computes between its products: norms, gate, rotation with the write to the KV cache, lookup.
// Rounded where torch's operators are (srt/layers/operators.py). pdl.cuh and values.cuh are put in front of it.
//
// V values of a thread lie behind each other, in 16 bytes where addresses and sizes allow, else V is 1.
//
// Macros: TYPE (0: bfloat16, 1: float16, 2: float32).
#define WIDE (16 / (int)sizeof(T))

template <int V> struct alignas(V * sizeof(T)) Pack {
  T v[V];
};
template <int V> struct alignas(V) Bytes {
  u8 v[V];
};
template <int V> __device__ __forceinline__ Pack<V> load(const T *from) { return *(const Pack<V> *)from; }
template <int V> __device__ __forceinline__ void store(T *to, const Pack<V> &pack) { *(Pack<V> *)to = pack; }

// ------------------------------------------------------------------------------------------------------------- norms
struct NormParams {
  T *x;              // rows of n at multiples of x_stride; becomes the sum where there is a residual
  const T *residual; // or null
  const T *weight;   // [n]
  T *out;            // [rows, n]
  long long x_stride, residual_stride;
  int n;
  float eps;
};

__device__ __forceinline__ float block_sum(float v) { // the same bits in every thread; once in a kernel
  __shared__ float sums[32];
  const int lane = threadIdx.x & 31, warps = blockDim.x / 32;
  v = warp_sum(v);
  if (warps == 1) return v;
  if (lane == 0) sums[threadIdx.x / 32] = v;
  __syncthreads();
  return warp_sum(lane < warps ? sums[lane] : 0.f);
}

// A block per row, PER packs per thread. Aligned rows, n a multiple of WIDE, at most PER * WIDE * blockDim.x. Weights
// are read early where registers hold them.
template <int PER> __device__ __forceinline__ void norm_row(const NormParams &p) {
  begin_next_kernel();
  const int packs = p.n / WIDE;
  Pack<WIDE> x[PER], w[PER];
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (PER <= 2 && at < packs) w[i] = load<WIDE>(p.weight + at * WIDE);
  }
  wait_for_previous_kernel();
  T *const row = p.x + blockIdx.x * p.x_stride, *const out = p.out + (long long)blockIdx.x * p.n;
  const T *const residual = p.residual + blockIdx.x * p.residual_stride;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= packs) continue;
    x[i] = load<WIDE>(row + at * WIDE);
    if (p.residual) {
      const Pack<WIDE> r = load<WIDE>(residual + at * WIDE);
#pragma unroll
      for (int e = 0; e < WIDE; ++e) x[i].v[e] = narrow(widen(x[i].v[e]) + widen(r.v[e]));
      store(row + at * WIDE, x[i]);
    }
#pragma unroll
    for (int e = 0; e < WIDE; ++e) sum = fmaf(widen(x[i].v[e]), widen(x[i].v[e]), sum);
  }
  const float scale = rsqrtf(block_sum(sum) / p.n + p.eps);
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= packs) continue;
    if (PER > 2) w[i] = load<WIDE>(p.weight + at * WIDE);
#pragma unroll
    for (int e = 0; e < WIDE; ++e) x[i].v[e] = narrow(widen(x[i].v[e]) * scale * widen(w[i].v[e]));
    store(out + at * WIDE, x[i]);
  }
}

#define NORM(PER, THREADS) \
  extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_##PER(const __grid_constant__ NormParams p) { norm_row<PER>(p); }
NORM(1, 512)
NORM(2, 512)
NORM(4, 1024)

// Any row. What a thread reads again is what it wrote itself.
extern "C" __global__ void __launch_bounds__(512) rms_norm_any(const __grid_constant__ NormParams p) {
  begin_next_kernel();
  wait_for_previous_kernel();
  T *const row = p.x + blockIdx.x * p.x_stride, *const out = p.out + (long long)blockIdx.x * p.n;
  const T *const residual = p.residual + blockIdx.x * p.residual_stride;
  float sum = 0.f;
  for (int at = threadIdx.x; at < p.n; at += blockDim.x) {
    if (p.residual) row[at] = narrow(widen(row[at]) + widen(residual[at]));
    sum = fmaf(widen(row[at]), widen(row[at]), sum);
  }
  const float scale = rsqrtf(block_sum(sum) / p.n + p.eps);
  for (int at = threadIdx.x; at < p.n; at += blockDim.x) out[at] = narrow(widen(row[at]) * scale * widen(p.weight[at]));
}

// Short rows in two sets: [tokens, heads, n] of each. `lanes` neighbouring threads per row, a power of two, a pack each.
struct HeadsParams {
  const T *q, *k, *q_weight, *k_weight;
  T *q_out, *k_out; // may be q and k
  long long q_stride, k_stride, q_out_stride, k_out_stride;           // between tokens
  int q_head_stride, k_head_stride, q_out_head_stride, k_out_head_stride; // between heads
  int tokens, heads, kv_heads, n, lanes;
  float eps;
};

extern "C" __global__ void __launch_bounds__(128) norm_heads(const __grid_constant__ HeadsParams p) {
  begin_next_kernel();
  const int per_block = blockDim.x / p.lanes, in_token = p.heads + p.kv_heads;
  const long long row = (long long)blockIdx.x * per_block + threadIdx.x / p.lanes, token = row / in_token;
  const int head = row - token * in_token, at = threadIdx.x % p.lanes * WIDE;
  const bool is_k = head >= p.heads, mine = token < p.tokens && at < p.n;
  Pack<WIDE> x, w;
  if (mine) w = load<WIDE>((is_k ? p.k_weight : p.q_weight) + at);
  wait_for_previous_kernel();
  float sum = 0.f;
  if (mine) {
    x = load<WIDE>((is_k ? p.k + token * p.k_stride + (head - p.heads) * p.k_head_stride : p.q + token * p.q_stride + head * p.q_head_stride) + at);
#pragma unroll
    for (int e = 0; e < WIDE; ++e) sum = fmaf(widen(x.v[e]), widen(x.v[e]), sum);
  }
  for (int o = p.lanes / 2; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  if (!mine) return;
  const float scale = rsqrtf(sum / p.n + p.eps);
#pragma unroll
  for (int e = 0; e < WIDE; ++e) x.v[e] = narrow(widen(x.v[e]) * scale * widen(w.v[e]));
  store((is_k ? p.k_out + token * p.k_out_stride + (head - p.heads) * p.k_out_head_stride : p.q_out + token * p.q_out_stride + head * p.q_out_head_stride) + at, x);
}

// -------------------------------------------------------------------------------------------------------------- gate
struct GateParams {
  const T *x; // rows of 2n at multiples of stride
  T *out;     // [rows, n]
  long long stride;
  int n;
};

template <int V> __device__ __forceinline__ void gate(const GateParams &p) { // blockIdx.x: the row
  begin_next_kernel();
  wait_for_previous_kernel();
  const int at = (blockIdx.y * blockDim.x + threadIdx.x) * V;
  if (at >= p.n) return;
  const T *const row = p.x + blockIdx.x * p.stride;
  Pack<V> a = load<V>(row + at);
  const Pack<V> b = load<V>(row + p.n + at);
#pragma unroll
  for (int e = 0; e < V; ++e) {
    const float v = widen(a.v[e]);
    a.v[e] = narrow(rounded(v / (1.f + expf(-v))) * widen(b.v[e]));
  }
  store(p.out + (long long)blockIdx.x * p.n + at, a);
}

extern "C" __global__ void __launch_bounds__(128) silu_and_mul(const __grid_constant__ GateParams p) { gate<WIDE>(p); }
extern "C" __global__ void __launch_bounds__(128) silu_and_mul_any(const __grid_constant__ GateParams p) { gate<1>(p); }

// ---------------------------------------------------------------------------------------------------------- rotation
struct RotateParams {
  T *q, *k;            // [tokens, heads, 2 half] and [tokens, kv_heads, 2 half], rotated in place
  const T *v;          // as k
  const T *cos, *sin;  // [tokens, 2 half]
  void *keys, *values; // rows of [kv_heads, 2 half] at multiples of slot_stride: T, or e4m3 with value = stored * scale
  const long long *loc; // [tokens]: which rows
  long long q_stride, k_stride, v_stride, key_stride, value_stride;
  int heads, kv_heads, half, e4m3; // no kv_heads: only q is rotated
  float k_scale, v_scale;
};

template <int V>
__device__ __forceinline__ void cache(void *buffer, long long at, const Pack<V> &x, bool e4m3, float inverse) {
  if (!e4m3) {
    store((T *)buffer + at, x);
    return;
  }
  Bytes<V> bytes;
#pragma unroll
  for (int e = 0; e < V; ++e) bytes.v[e] = saturated_e4m3(x.v[e], inverse);
  *(Bytes<V> *)((u8 *)buffer + at) = bytes;
}

// blockIdx.x: the token. A thread takes V values of a head's first half and those of the second that belong to them.
template <int V> __device__ __forceinline__ void rotate_rows(const RotateParams &p) {
  begin_next_kernel();
  const int per_head = p.half / V, unit = blockIdx.y * blockDim.x + threadIdx.x;
  const int head = unit / per_head, at = unit % per_head * V, dim = 2 * p.half;
  const int kv_head = head < p.heads + p.kv_heads ? head - p.heads : head - p.heads - p.kv_heads;
  const long long token = blockIdx.x;
  wait_for_previous_kernel();
  if (head >= p.heads + 2 * p.kv_heads) return;
  if (head >= p.heads + p.kv_heads) {
    const T *const row = p.v + token * p.v_stride + kv_head * dim;
    const long long to = p.loc[token] * p.value_stride + kv_head * dim;
    cache(p.values, to + at, load<V>(row + at), p.e4m3, 1.f / p.v_scale);
    cache(p.values, to + p.half + at, load<V>(row + p.half + at), p.e4m3, 1.f / p.v_scale);
    return;
  }
  T *const row = head < p.heads ? p.q + token * p.q_stride + head * dim : p.k + token * p.k_stride + kv_head * dim;
  const T *const cos = p.cos + token * dim + at, *const sin = p.sin + token * dim + at;
  Pack<V> a = load<V>(row + at), b = load<V>(row + p.half + at);
  const Pack<V> a_cos = load<V>(cos), b_cos = load<V>(cos + p.half), a_sin = load<V>(sin), b_sin = load<V>(sin + p.half);
#pragma unroll
  for (int e = 0; e < V; ++e) {
    const T x = a.v[e], y = b.v[e];
    a.v[e] = rotated(x, y, a_cos.v[e], a_sin.v[e]);
    b.v[e] = rotated(y, x, b_cos.v[e], b_sin.v[e]);
  }
  store(row + at, a);
  store(row + p.half + at, b);
  if (head >= p.heads) {
    const long long to = p.loc[token] * p.key_stride + kv_head * dim;
    cache(p.keys, to + at, a, p.e4m3, 1.f / p.k_scale);
    cache(p.keys, to + p.half + at, b, p.e4m3, 1.f / p.k_scale);
  }
}

extern "C" __global__ void __launch_bounds__(128) rotate(const __grid_constant__ RotateParams p) { rotate_rows<WIDE>(p); }
extern "C" __global__ void __launch_bounds__(128) rotate_any(const __grid_constant__ RotateParams p) { rotate_rows<1>(p); }

struct CosSinParams {
  const long long *positions; // [tokens]
  const float *inv_freq;      // [half], or rows of it at multiples of stride
  T *cos, *sin;               // [tokens, 2 half]
  int stride, half;
  float factor;
};

extern "C" __global__ void __launch_bounds__(64) cos_sin(const __grid_constant__ CosSinParams p) { // blockIdx.x: the token
  wait_for_previous_kernel(); // and lets no kernel begin early, see pdl.cuh
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= p.half) return;
  const long long token = blockIdx.x;
  // Not contracted with what the functions begin with: torch rounds the angle.
  const float angle = __fmul_rn((float)p.positions[token], p.inv_freq[token * p.stride + i]);
  const float c = cosf(angle) * p.factor, s = sinf(angle) * p.factor;
  T *const cos = p.cos + token * 2 * p.half + i, *const sin = p.sin + token * 2 * p.half + i;
  cos[0] = cos[p.half] = narrow(c);
  sin[0] = narrow(-s);
  sin[p.half] = narrow(s);
  write_through();
}

// ------------------------------------------------------------------------------------------------------------ lookup
struct EmbeddingParams {
  const long long *ids; // [tokens]
  const T *weight;      // [size, n]
  T *out;               // [tokens, n]
  long long first;      // the id of the weight's first row
  int size, n, part;    // part: ids of other rows are another rank's and give zeros; else they are an error
};

template <int V> __device__ __forceinline__ void look_up(const EmbeddingParams &p) { // blockIdx.x: the token
  begin_next_kernel();
  wait_for_previous_kernel();
  const int at = (blockIdx.y * blockDim.x + threadIdx.x) * V;
  if (at >= p.n) return;
  const long long row = p.ids[blockIdx.x] - p.first;
  const bool here = row >= 0 && row < p.size;
  if (!here && !p.part) __trap();
  Pack<V> x = {};
  if (here) x = load<V>(p.weight + row * p.n + at);
  store(p.out + (long long)blockIdx.x * p.n + at, x);
}

extern "C" __global__ void __launch_bounds__(128) embedding(const __grid_constant__ EmbeddingParams p) { look_up<WIDE>(p); }
extern "C" __global__ void __launch_bounds__(128) embedding_any(const __grid_constant__ EmbeddingParams p) { look_up<1>(p); }
