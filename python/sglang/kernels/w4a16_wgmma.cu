// NVFP4 weight-only GEMM for larger M on compute capability 9.0: as w4a16_small.cu, with wgmma.
//
// Weights are the A operand, dequantised in registers; X is the B operand, COLS rows of it, read by the tensor cores from
// shared memory in the order that memory has them. So the k of a product are those of one block of scales, and lane
// (g, t) takes word t of the pieces (g, 0..3), where w4a16_small.cu takes the piece (g, t).
//
// A block is WG warpgroups that multiply, each with MT times 64 weight rows, and one warp that copies. Blocks of a cluster
// either take a share of K each (`split` of them) and add their sums over distributed shared memory, in order; or two of
// them (`share`) have neighbouring weight rows and the same rows of X, of which each copies half for both.
//
// Macros: TYPE, COLS, WG, MT, X_STAGES (of 64 k), W_STAGES (of 128 k), REGISTERS (of a multiplying thread), COPY_REGISTERS.
#define ROWS (64 * WG * MT)
#define STAGE_X (COLS * 128)
#define STAGE_W (ROWS / 16 * UNIT)
#define CONSUMERS (128 * WG)
#define BAND 8
#define PATCH 512 // bytes of Y that a warp stores at a time: CHUNKS times 16 bytes of PATCH_M rows
#define CHUNKS (2 * MT)
#define PATCH_M (32 / CHUNKS)

struct WideParams {
  TensorMap w_map;    // u64 [ceil(N / 16)][k_units][UNIT / 8], box [ROWS / 16][1][UNIT / 8]
  TensorMap x_map;    // u16 [K / 64][M][64], box [1][COLS / share][64], 128-byte swizzle
  u16 *y;             // [M, N], 16-byte aligned
  const float *scale; // [N]
  const u16 *bias;    // [N] or null
  int m, n, k_units;
  int n_tiles; // of share * ROWS weight rows
  int m_tiles, split, share;
};

__device__ __forceinline__ u64 descriptor(u32 address) { // K-major, 128-byte swizzle, 1024 bytes per eight rows
  return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16 | (address & 0x3FFFF) >> 4;
}

// Tiles that run at the same time share weights and X: bands of BAND tiles along M, along N within a band.
__device__ __forceinline__ int2 tile_place(const WideParams &p, int tile) {
  const int band = tile / (BAND * p.n_tiles), in_band = tile - band * BAND * p.n_tiles;
  const int height = min(BAND, p.m_tiles - band * BAND);
  return make_int2(in_band / height, band * BAND + in_band % height);
}

__device__ __forceinline__ u32 in_block(u32 address, u32 rank) { // of the cluster
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}

__device__ __forceinline__ void tensor_copy_to_both(u32 to, const TensorMap *map, int c1, int c2, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
               "l"(map), "n"(0), "r"(c1), "r"(c2), "r"(barrier), "h"((u16)3)
               : "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Orders `a` before the product that follows: were it defined later, the assembler would wait for each product.
__device__ __forceinline__ void fence_with(u32 *a) {
  asm volatile("wgmma.fence.sync.aligned;" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) w4a16_wgmma(const __grid_constant__ WideParams p) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = (u32)__cvta_generic_to_shared(smem), x_ring = base + CONTROL, w_ring = x_ring + X_STAGES * STAGE_X;
  const u32 x_full = base, x_empty = x_full + 8 * X_STAGES, w_full = x_empty + 8 * X_STAGES, w_empty = w_full + 8 * W_STAGES;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int size = p.split * p.share; // of the cluster; one of them is 1
  const int rank = blockIdx.x % size, cluster = blockIdx.x / size, clusters = gridDim.x / size;
  const int tiles = p.n_tiles * p.m_tiles;
  const int first = p.split > 1 ? rank * p.k_units / p.split : 0, last = p.split > 1 ? (rank + 1) * p.k_units / p.split : p.k_units;
  if (tid == 0) {
    for (int s = 0; s < X_STAGES + W_STAGES; ++s) {
      const bool of_x = s < X_STAGES;
      const u32 filled = of_x ? x_full + 8 * s : w_full + 8 * (s - X_STAGES), freed = filled + 8 * (of_x ? X_STAGES : W_STAGES);
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(filled));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(freed), "r"(of_x ? 4 * WG * p.share : 4 * WG));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (p.share > 1) cluster_sync();
  begin_next_kernel();

  if (warp >= 4 * WG) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPY_REGISTERS));
    if (warp == 4 * WG && lane == 0) {
      int j = 0;
      for (int tile = cluster; tile < tiles; tile += clusters) {
        const int2 where = tile_place(p, tile);
        const int n_tile = p.share > 1 ? where.x * 2 + rank : where.x, m_tile = where.y;
        for (int unit = first; unit < last; ++unit, ++j) {
          const int ws = j % W_STAGES;
          if (j >= W_STAGES) barrier_wait(w_empty + 8 * ws, (j / W_STAGES & 1) ^ 1);
          expect(w_full + 8 * ws, STAGE_W);
          tensor_copy(w_ring + ws * STAGE_W, &p.w_map, unit, n_tile * (ROWS / 16), w_full + 8 * ws);
          if (j == 0) wait_for_previous_kernel();
          for (int jx = 2 * j; jx < 2 * j + 2; ++jx) {
            const int s = jx % X_STAGES, step = 2 * unit + (jx & 1);
            const u32 to = x_ring + s * STAGE_X, filled = x_full + 8 * s;
            if (jx >= X_STAGES) barrier_wait(x_empty + 8 * s, (jx / X_STAGES & 1) ^ 1);
            expect(filled, STAGE_X);
            if (p.share > 1)
              tensor_copy_to_both(to + rank * (STAGE_X / 2), &p.x_map, m_tile * COLS + rank * (COLS / 2), step, filled);
            else
              tensor_copy(to, &p.x_map, m_tile * COLS, step, filled);
          }
        }
      }
    }
    __syncwarp();
    if (p.split > 1) cluster_sync();
    if (size > 1) cluster_sync();
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
  wait_for_previous_kernel();
  // Without a branch, for which the assembler would wait for products.
  auto release = [&](u32 barrier, bool any) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n}" ::"r"(barrier), "r"((u32)any) : "memory");
  };
  const u32 x_empty_there = in_block(x_empty, p.share > 1 ? lane & 1 : rank), w_empty_there = in_block(w_empty, rank);
  const int block = warp * MT; // of 16 rows; the next MT are the warp's
  int pieces[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) pieces[c] = block * UNIT + PIECE(g, c) + t * 4;
  int j = 0;
  for (int tile = cluster; tile < tiles; tile += clusters) {
    const int2 where = tile_place(p, tile);
    const int n_tile = p.share > 1 ? where.x * 2 + rank : where.x, m_tile = where.y;
    float acc[MT][COLS / 2];
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int c = 0; c < COLS / 2; ++c) acc[i][c] = 0.f;
    u32 a[4][4]; // a product reads its fragment of weights while the next ones are made
    for (int unit = first; unit < last; ++unit, ++j) {
      barrier_wait(w_full + 8 * (j % W_STAGES), j / W_STAGES & 1);
      const char *const w = smem + CONTROL + X_STAGES * STAGE_X + j % W_STAGES * STAGE_W;
      u64 x = 0;
      uint4 bytes[MT]; // scales of the four blocks of either step
      u32 codes[2][4]; // of a group of products and of the next
#pragma unroll
      for (int i = 0; i < MT; ++i) bytes[i] = *(const uint4 *)(w + (block + i) * UNIT + 1024 + g * 16);
#pragma unroll
      for (int c = 0; c < 4; ++c) codes[0][c] = *(const u32 *)(w + pieces[c]);
#pragma unroll
      for (int group = 0; group < 2 * MT; ++group) {
        const int half = group / MT, i = group % MT, next = group + 1;
        if (next < 2 * MT)
#pragma unroll
          for (int c = 0; c < 4; ++c) codes[next & 1][c] = *(const u32 *)(w + pieces[c] + next % MT * UNIT + next / MT * 512);
        if (i == 0) {
          const int jx = 2 * j + half;
          barrier_wait(x_full + 8 * (jx % X_STAGES), jx / X_STAGES & 1);
          x = descriptor(x_ring + jx % X_STAGES * STAGE_X);
        }
        const u32 scales[4] = {bytes[i].x, bytes[i].y, bytes[i].z, bytes[i].w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          dequantize(codes[group & 1][c], decode_scales(scales[c], half), a[c]);
          fence_with(a[c]);
          wgmma(acc[i], a[c], x + c * 2);
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          asm volatile("wgmma.wait_group.sync.aligned 3;" ::: "memory"); // the one that reads the next fragment's registers is done
          if (i == 0 && c == 2) release(x_empty_there + 8 * ((2 * j + half - 1) % X_STAGES), (half || unit > first) && lane < p.share);
        }
      }
      release(w_empty_there + 8 * (j % W_STAGES), lane == 0);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    release(x_empty_there + 8 * ((2 * j - 1) % X_STAGES), last > first && lane < p.share);

    // A lane has rows g and g + 8 of a block times columns 8 c + 2 t, + 1. Patches pass through shared memory, so that a
    // store takes 16 bytes of a row of Y.
    const int n_warp = n_tile * ROWS + block * 16;
    float scale[MT][2], bias[MT][2];
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int n = n_warp + i * 16 + g + 8 * h;
        scale[i][h] = n < p.n ? p.scale[n] : 0.f;
        bias[i][h] = p.bias && n < p.n ? widen(p.bias[n]) : 0.f;
      }
    const u32 at = w_ring + W_STAGES * STAGE_W + warp * PATCH;
    auto place = [](int row, int chunk) { return (row * CHUNKS + (chunk ^ (row * CHUNKS / 8 & (CHUNKS - 1)))) * 16; };
    auto emit = [&](int patch, const float (*v)[4]) { // v: of each 8 rows of X in turn, then of each block
      u32 out[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int i = q / 2 % MT, h = q & 1;
        const float *const from = v[q / 2] + 2 * h;
        out[q] = pair_of<TYPE == 1>(from[0] * 128.f * scale[i][h] + bias[i][h], from[1] * 128.f * scale[i][h] + bias[i][h]);
      }
      const int q = lane >> 3;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at + place(q / CHUNKS * 8 + (lane & 7), q % CHUNKS)),
                   "r"(out[0]), "r"(out[1]), "r"(out[2]), "r"(out[3])
                   : "memory");
      __syncwarp();
      const int chunk = lane % CHUNKS, row = m_tile * COLS + patch * PATCH_M + lane / CHUNKS, n = n_warp + chunk * 8;
      uint4 piece;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w) : "r"(at + place(lane / CHUNKS, chunk)) : "memory");
      __syncwarp();
      if (row < p.m && n < p.n) {
        u16 *const y = p.y + (long long)row * p.n + n;
        if (p.n % 8 == 0)
          *(uint4 *)y = piece;
        else {
          const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
          for (int e = 0; e < 8; ++e)
            if (n + e < p.n) y[e] = (u16)(words[e / 2] >> (e & 1) * 16);
        }
      }
    };
    // The two sets of four sums that a patch has: (i, c) = (0, patch), (1, patch) or (0, 2 patch), (0, 2 patch + 1).
    auto index = [](int patch, int which) { return MT == 2 ? which * (COLS / 2) + 4 * patch : 4 * (2 * patch + which); };
    if (p.split == 1) {
#pragma unroll
      for (int patch = 0; patch < COLS / PATCH_M; ++patch) {
        float v[2][4];
#pragma unroll
        for (int which = 0; which < 2; ++which)
#pragma unroll
          for (int e = 0; e < 4; ++e) v[which][e] = acc[index(patch, which) / (COLS / 2)][index(patch, which) % (COLS / 2) + e];
        emit(patch, v);
      }
    } else { // one tile per cluster, so the ring is free
      asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
      float *const mine = (float *)(smem + CONTROL) + tid;
#pragma unroll
      for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int c = 0; c < COLS / 2; ++c) mine[(i * (COLS / 2) + c) * CONSUMERS] = acc[i][c];
      cluster_sync();
      const int patches_in_all = COLS / PATCH_M;
#pragma unroll 1
      for (int patch = rank * patches_in_all / p.split; patch < (rank + 1) * patches_in_all / p.split; ++patch) {
        float v[2][4] = {};
#pragma unroll 1
        for (int r = 0; r < p.split; ++r)
#pragma unroll
          for (int which = 0; which < 2; ++which)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float part;
              asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(part) : "r"(in_block(x_ring + ((index(patch, which) + e) * CONSUMERS + tid) * 4, r)) : "memory");
              v[which][e] += part;
            }
        emit(patch, v);
      }
    }
  }
  if (size > 1) cluster_sync();
}
