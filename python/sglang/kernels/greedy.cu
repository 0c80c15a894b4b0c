// The largest logit of each row and the first token that has it. pdl.cuh is put in front of it.
//
// gridDim.y blocks, at most 32, share a row; the one that comes last combines what they found.
struct GreedyParams {
  const float *x; // rows of n at multiples of stride
  float *values;  // [rows]
  long long *ids; // [rows], or one of the codes below
  u64 *partial;   // [rows, splits]
  u32 *arrived;   // [rows], zeros before and after
  long long stride;
  int n, chunk;   // of a block, a multiple of 4; gridDim.y splits cover a row
  int vector;     // rows begin at multiples of 16 bytes
  int broken, impossible; // codes of rows with a NaN or infinity, and of rows of -infinity
};

// Orders as (value, then the lower index first); NaN above all.
__device__ __forceinline__ u64 key_of(float v, int index) {
  const u32 bits = __float_as_uint(v + 0.f); // -0 equals 0
  const u32 ordered = v != v ? ~0u : bits >> 31 ? ~bits : bits | 0x80000000u;
  return (u64)ordered << 32 | (u32)~index;
}

__device__ __forceinline__ u64 warp_max(u64 key) {
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    const u64 other = __shfl_xor_sync(~0u, key, o);
    key = other > key ? other : key;
  }
  return key;
}

extern "C" __global__ void __launch_bounds__(256) greedy(const __grid_constant__ GreedyParams p) { // blockIdx.x: the row
  __shared__ u64 keys[8];
  __shared__ bool last;
  begin_next_kernel();
  wait_for_previous_kernel();
  const float *const row = p.x + blockIdx.x * p.stride;
  const int begin = blockIdx.y * p.chunk, end = min(begin + p.chunk, p.n), lane = threadIdx.x & 31;
  u64 key = 0; // below all others
  float best = 0.f;
  int index = -1;
  auto see = [&](float v, int at) { // in ascending order
    if (index < 0 || (!(v <= best) && best == best)) {
      best = v;
      index = at;
    }
  };
  for (int at = begin + threadIdx.x * 4; at < end; at += blockDim.x * 4) {
    if (p.vector && at + 4 <= end) {
      const float4 v = *(const float4 *)(row + at);
      see(v.x, at);
      see(v.y, at + 1);
      see(v.z, at + 2);
      see(v.w, at + 3);
    } else
      for (int i = at; i < min(at + 4, end); ++i) see(row[i], i);
  }
  if (index >= 0) key = key_of(best, index);
  key = warp_max(key);
  if (lane == 0) keys[threadIdx.x / 32] = key;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  key = warp_max(lane < blockDim.x / 32 ? keys[lane] : 0);
  if (gridDim.y > 1) {
    u64 *const partial = p.partial + (long long)blockIdx.x * gridDim.y;
    if (lane == 0) {
      __stcg(partial + blockIdx.y, key);
      __threadfence();
      last = atomicInc(p.arrived + blockIdx.x, gridDim.y - 1) == gridDim.y - 1; // the last one sets it to zero
      __threadfence();
    }
    __syncwarp();
    if (!last) return;
    key = warp_max(lane < gridDim.y ? __ldcg(partial + lane) : 0);
  }
  if (lane) return;
  const u32 ordered = key >> 32;
  const float largest = __uint_as_float(ordered >> 31 ? ordered & 0x7FFFFFFFu : ~ordered);
  const float infinity = __uint_as_float(0x7F800000u);
  p.values[blockIdx.x] = largest;
  // A NaN is not less.
  p.ids[blockIdx.x] = largest == -infinity ? p.impossible : largest < infinity ? (int)~(u32)key : p.broken;
}
