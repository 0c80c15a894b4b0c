// NVFP4 weight-only GEMM for larger M on compute capability 9.0: as w4a16_small.cu, with wgmma.
//
// Weights are the A operand, dequantised in registers in the same fragments as mma.m16n8k16; X is the B operand, COLS
// rows of it, read by the tensor cores from shared memory. There the k of a step of 64 must lie in the order of the
// fragments, so w4a16_permute writes X in that order first.
//
// A block is WG warpgroups that multiply, each with MT times 64 weight rows, and one warp that copies. The blocks of a
// cluster (`split` of them) take a share of K each and add their sums over distributed shared memory, in order.
//
// Macros: HALF, COLS, WG, MT, STAGES (of 128 k), REGISTERS (of a multiplying thread), COPY_REGISTERS.
#define ROWS (64 * WG * MT)
#define STAGE_X (COLS * 256)
#define STAGE_W (ROWS / 16 * UNIT)
#define STAGE (STAGE_X + (STAGE_W + 1023) / 1024 * 1024)
#define CONSUMERS (128 * WG)
#define BAND 8

struct WideParams {
  TensorMap w_map;    // u64 [ceil(N / 16)][k_units][UNIT / 8], box [ROWS / 16][1][UNIT / 8]
  TensorMap x_map;    // u16 [K / 64][M][64] of permuted X, box [2][COLS][64], 128-byte swizzle
  u16 *y;             // [M, N]
  const float *scale; // [N]
  const u16 *bias;    // [N] or null
  int m, n, k_units, n_tiles, m_tiles, split;
};

struct PermuteParams {
  const u16 *x; // [M, K], row stride x_stride
  u16 *out;     // [M, K]
  long long x_stride;
  int m, k; // K a multiple of 64
};

// Fragment order of a step of 64 k: product i takes, as its k 0..15, the pairs (16 t + 4 i) for t = 0..3, then the pairs
// (16 t + 4 i + 2). A thread writes four pairs.
extern "C" __global__ void __launch_bounds__(256) w4a16_permute(const __grid_constant__ PermuteParams p) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  wait_for_previous_kernel();
  const int pieces = p.k / 8;
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < (long long)p.m * pieces; i += gridDim.x * 256ll) {
    const int row = i / pieces, piece = i % pieces;
    const u16 *const from = p.x + row * p.x_stride + piece / 8 * 64 + (piece & 7) * 2;
    uint4 v;
    v.x = *(const u32 *)from;
    v.y = *(const u32 *)(from + 16);
    v.z = *(const u32 *)(from + 32);
    v.w = *(const u32 *)(from + 48);
    *(uint4 *)(p.out + (long long)row * p.k + piece * 8) = v;
  }
}

__device__ __forceinline__ u64 descriptor(u32 address) { // K-major, 128-byte swizzle, 1024 bytes per eight rows
  return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16 | (address & 0x3FFFF) >> 4;
}

__device__ __forceinline__ u32 transpose8x8(u32 v) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

__device__ __forceinline__ u32 to_output2(float low, float high) {
  u32 r;
#if HALF
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
  return r;
}

// Tiles that run at the same time share weights and X: bands of BAND tiles along M, along N within a band.
__device__ __forceinline__ int2 tile_place(const WideParams &p, int tile) {
  const int band = tile / (BAND * p.n_tiles), in_band = tile - band * BAND * p.n_tiles;
  const int height = min(BAND, p.m_tiles - band * BAND);
  return make_int2(in_band / height, band * BAND + in_band % height);
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) w4a16_wgmma(const __grid_constant__ WideParams p) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = (u32)__cvta_generic_to_shared(smem), ring = base + CONTROL;
  const u32 full = base, empty = base + 8 * STAGES;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int rank = blockIdx.x % p.split, cluster = blockIdx.x / p.split, clusters = gridDim.x / p.split;
  const int tiles = p.n_tiles * p.m_tiles;
  const int first = rank * p.k_units / p.split, last = (rank + 1) * p.k_units / p.split;
  if (tid == 0) {
    for (int s = 0; s < STAGES; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * s));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * s), "n"(4 * WG));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  if (warp >= 4 * WG) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPY_REGISTERS));
    if (warp == 4 * WG && lane == 0) {
      int j = 0;
      for (int tile = cluster; tile < tiles; tile += clusters) {
        const int2 where = tile_place(p, tile);
        const int n_tile = where.x, m_tile = where.y;
        for (int unit = first; unit < last; ++unit, ++j) {
          const int s = j % STAGES;
          if (j >= STAGES) barrier_wait(empty + 8 * s, (j / STAGES & 1) ^ 1);
          expect(full + 8 * s, STAGE_X + STAGE_W);
          tensor_copy(ring + s * STAGE + STAGE_X, &p.w_map, unit, n_tile * (ROWS / 16), full + 8 * s);
          if (j == 0) wait_for_previous_kernel();
          tensor_copy(ring + s * STAGE, &p.x_map, m_tile * COLS, unit * 2, full + 8 * s);
        }
      }
    }
    if (p.split > 1) {
      __syncwarp();
      cluster_sync();
      cluster_sync();
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
  wait_for_previous_kernel();
  const int block = (warp >> 2) * (4 * MT) + (warp & 3); // of 16 rows; its next ones are four further
  int j = 0;
  for (int tile = cluster; tile < tiles; tile += clusters) {
    const int2 where = tile_place(p, tile);
    const int n_tile = where.x, m_tile = where.y;
    float acc[MT][COLS / 2];
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int c = 0; c < COLS / 2; ++c) acc[i][c] = 0.f;
    u32 a[2][16]; // one is filled while the tensor cores read the other
    for (int unit = first; unit < last; ++unit, ++j) {
      const int s = j % STAGES;
      barrier_wait(full + 8 * s, j / STAGES & 1);
      const char *const w = smem + CONTROL + s * STAGE + STAGE_X + block * UNIT;
      const u64 x = descriptor(ring + s * STAGE);
      u32 bytes[MT];
      uint4 codes[2][MT];
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        bytes[i] = *(const u32 *)(w + i * (4 * UNIT) + 1024 + lane * 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) codes[half][i] = *(const uint4 *)(w + i * (4 * UNIT) + half * 512 + lane * 16);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          u32 *const now = a[(half * MT + i) & 1];
          const uint4 q = codes[half][i];
          const u32 pair = decode_scales(bytes[i], half), s0 = __byte_perm(pair, pair, 0x1010), s1 = __byte_perm(pair, pair, 0x3232);
          dequantize(q.x, s0, s1, now);
          dequantize(q.y, s0, s1, now + 4);
          dequantize(q.z, s0, s1, now + 8);
          dequantize(q.w, s0, s1, now + 12);
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
          for (int c = 0; c < 4; ++c) wgmma(acc[i], now + 4 * c, x + (half * COLS * 128 + c * 32) / 16);
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (half == 0 && i == 0 && unit > first && lane == 0)
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + 8 * ((j - 1) % STAGES)) : "memory");
        }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (lane == 0 && last > first) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + 8 * ((j - 1) % STAGES)) : "memory");

    // Rows g and g + 8 of a block times columns 8 c + 2 t, + 1.
    float scale[MT][2], bias[MT][2];
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int n = n_tile * ROWS + (block + 4 * i) * 16 + g + 8 * h;
        scale[i][h] = n < p.n ? p.scale[n] : 0.f;
        bias[i][h] = p.bias && n < p.n ? from_input(p.bias[n]) : 0.f;
      }
    auto emit = [&](int i, int c, float v0, float v1, float v2, float v3) {
      const int n0 = n_tile * ROWS + (block + 4 * i) * 16;
      const u32 low = to_output2(v0 * 128.f * scale[i][0] + bias[i][0], v1 * 128.f * scale[i][0] + bias[i][0]);
      const u32 high = to_output2(v2 * 128.f * scale[i][1] + bias[i][1], v3 * 128.f * scale[i][1] + bias[i][1]);
      const u32 out[2] = {transpose8x8(low), transpose8x8(high)}; // row 8 c + g of Y, columns n0 + 2 t and n0 + 8 + 2 t
      const int row = m_tile * COLS + 8 * c + g;
      if (row < p.m) {
        u16 *const y = p.y + (long long)row * p.n + n0 + 2 * t;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int n = n0 + 8 * h + 2 * t;
          if (n + 1 < p.n && (p.n & 1) == 0)
            *(u32 *)(y + 8 * h) = out[h];
          else {
            if (n < p.n) y[8 * h] = (u16)out[h];
            if (n + 1 < p.n) y[8 * h + 1] = (u16)(out[h] >> 16);
          }
        }
      }
    };
    if (p.split == 1) {
#pragma unroll
      for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int c = 0; c < COLS / 8; ++c) emit(i, c, acc[i][4 * c], acc[i][4 * c + 1], acc[i][4 * c + 2], acc[i][4 * c + 3]);
    } else { // one tile per cluster, so the ring is free
      asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
      float *const mine = (float *)(smem + CONTROL) + tid;
#pragma unroll
      for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int c = 0; c < COLS / 2; ++c) mine[(i * (COLS / 2) + c) * CONSUMERS] = acc[i][c];
      cluster_sync();
      const int from = rank * (COLS / 8) / p.split, to = (rank + 1) * (COLS / 8) / p.split;
#pragma unroll
      for (int i = 0; i < MT; ++i)
        for (int c = from; c < to; ++c) {
          float v[4] = {0.f, 0.f, 0.f, 0.f};
          for (int r = 0; r < p.split; ++r)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              u32 remote;
              float part;
              asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(ring + ((i * (COLS / 2) + 4 * c + e) * CONSUMERS + tid) * 4), "r"(r));
              asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(part) : "r"(remote) : "memory");
              v[e] += part;
            }
          emit(i, c, v[0], v[1], v[2], v[3]);
        }
      cluster_sync();
    }
  }
}
