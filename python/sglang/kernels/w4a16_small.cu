// NVFP4 weight-only GEMM for small M: Y[M, N] = round(X[M, K] (e2m1 * e4m3)^T * scale[N] + bias[N]), float32 sums.
//
// Weights are the A operand of mma.m16n8k16, dequantised in registers; X is the B operand, from shared memory.
// A unit holds 16 rows x 128 k in 1152 bytes: two steps of 64 k x 32 pieces of 16 bytes of codes, then 32 times 4 bytes
// of scales. In a step piece (g, t), read by lane 4 g + t, has rows g and g + 8 of the 16 k of block t, which share a
// scale: so one 16-byte load and two scale bytes feed four mma, and the k of an mma are a permutation that X follows.
// Word i of the 16 bytes has the pairs (row g, k 2 i, 2 i + 1), (g + 8, the same), (g, k 2 i + 8, 2 i + 9), (g + 8, the
// same), every code's bits spread so that most pairs cost one shift and one mask (w4a16_layout.py has the positions).
//
// A block owns tiles of ROWS = 16 RB WN rows, for COLS rows of X (blockIdx.y says which). Its WK warps along K take
// units in turn and add their sums at the end of a tile, in order; its WN warps along N share X. On compute capability
// 9.0 up another warp copies, elsewhere all warps do. Work is numbered tile by tile in stages of STAGE_UNITS units, and
// cut into as many ranges as there are blocks, at multiples of `granule` stages: where CUT lets that be less than a tile,
// the block that has a tile's first stages adds what the blocks with later ranges leave in `partial`, in order. Those
// have lower numbers, so it never waits for a block that may not have started.
//
// One row of X is loaded whole by the consumers, as soon as the previous kernel has ended; by then they have what else
// they read for a tile. Until X is there only IN_FLIGHT stages of weights are asked for at once, behind which it waits.
//
// What surrounds a product in a transformer can be part of it, rounded where the kernels of layers.cu round:
//   gate_blocks: half of a tile's rows are gates and half what they are for; Y [M, N / 2] = silu(gate) * the other.
//   residual: the product is added to it; Y is the sum times norm_weight, and `squares` has what is still to be divided
//     by, the root of the mean of the sum's squares. x_squares: X is such a Y, which the product is divided for.
//
// Macros: TYPE (0: bfloat16, 1: float16), NB (8 NB rows of X at most), RB, WN, WK, U (units of a warp in a stage), STAGES,
// MINB (blocks per multiprocessor), CUT, ONE_ROW (of X, which shared memory holds whole instead of a part in each stage).
struct Params {
  TensorMap w_map;    // u64 [ceil(N / 16)][k_units][UNIT / 8], box [RB WN][STAGE_UNITS][UNIT / 8]
  TensorMap x_map;    // u16 [K / 64][M][64], box [STAGE_K / 64][COLS][64], 128-byte swizzle
  const char *w;      // [ceil(N / 16)][k_units][UNIT]
  const u16 *x;       // [M, K], row stride x_stride, 16-byte aligned rows, K a multiple of 64
  u16 *y;             // [M, N]
  const float *scale; // [N]
  const u16 *bias;    // [N] or null
  long long x_stride;
  int m, n, k, k_units;
  int row_blocks; // ceil(N / 16)
  int stages;     // per tile: ceil(k_units / STAGE_UNITS)
  int tiles, granule; // `stages`, or with CUT 1
  float *partial;     // [blocks][COLS * ROWS]
  int *ready;         // [blocks], zero before and after
  u16 *residual;          // [M, N] or null; becomes the sum
  const u16 *norm_weight; // [N]
  float *squares;         // [M, N / 16], of 16 columns each; N is a multiple of 16
  const float *x_squares; // [M, K / 16], aligned to 16 bytes, or null
  float x_eps;            // added to the mean
  int gate_blocks;        // of 16 rows, with as many behind them; or 0
};

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// What the block's threads wrote before their last barrier becomes visible to whoever takes the flag.
__device__ __forceinline__ void give(int *ready) {
  __threadfence();
  asm volatile("st.release.gpu.s32 [%0], %1;" ::"l"(ready), "r"(1) : "memory");
}

__device__ __forceinline__ void take(int *ready) {
  int v;
  do asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(v) : "l"(ready) : "memory");
  while (v == 0);
  *ready = 0;
}

__device__ __forceinline__ void fetch(const void *from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

struct Column { // what the end of a tile reads for one value: of the gate, if there is one, and of what it is for
  float scale[2];
  u16 bias[2], norm_weight, residual;
};

__device__ __forceinline__ float sum_of(const float4 &v) { return v.x + v.y + (v.z + v.w); }

struct Place { // of a stage in the work of a block
  int tile, stage;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      ++tile;
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MINB) w4a16_gemm(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
  const u32 x_bytes = ONE_ROW ? (p.k_units * 256 + 1023) / 1024 * 1024 : 0; // before the stages
  const u32 base = (u32)__cvta_generic_to_shared(smem), ring = base + CONTROL + x_bytes;
  auto begin = [&](int range) { return (int)((long long)range * (p.tiles * p.stages / p.granule) / gridDim.x) * p.granule; };
  const int range = gridDim.x - 1 - blockIdx.x, from_stage = begin(range), count = begin(range + 1) - from_stage;
  const Place start = {from_stage / p.stages, from_stage % p.stages};
  const int m = min(p.m - (int)blockIdx.y * COLS, COLS);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int wk = warp % WK, wn = warp / WK;
  float *const red = (float *)(smem + CONTROL + x_bytes + STAGES * STAGE);
  float *const x_scale = (float *)(smem + CONTROL / 2); // [COLS], behind the barriers; then, for ONE_ROW, what warps found
  const int width = p.gate_blocks ? ROWS / 2 : ROWS;    // columns of Y that a tile gives
  const int columns = p.gate_blocks ? p.n / 2 : p.n;    // of Y

  auto column_of = [&](int n) {
    Column c = {};
    c.scale[0] = p.scale[n];
    if (p.bias) c.bias[0] = p.bias[n];
    if (p.gate_blocks) {
      c.scale[1] = p.scale[columns + n];
      if (p.bias) c.bias[1] = p.bias[columns + n];
    }
    if (p.residual) c.norm_weight = p.norm_weight[n];
    return c;
  };

#if BULK
  const u32 full = base, empty = base + 8 * STAGES;
  if (tid == 0) {
    for (int s = 0; s < STAGES; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * s));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * s), "n"(WN * WK));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp == WN * WK) { // the producer; the weights, which no kernel writes, need not wait for the previous one
    Place at = start;
    auto load_w = [&](int j) {
      const int s = j % STAGES;
      const u32 to = ring + s * STAGE + STAGE_X;
      expect(full + 8 * s, STAGE_X + STAGE_W);
      if (p.gate_blocks) { // the map's box is half as high
        tensor_copy(to, &p.w_map, at.stage * STAGE_UNITS, at.tile * (RB * WN / 2), full + 8 * s);
        tensor_copy(to + STAGE_W / 2, &p.w_map, at.stage * STAGE_UNITS, p.gate_blocks + at.tile * (RB * WN / 2), full + 8 * s);
      } else
        tensor_copy(to, &p.w_map, at.stage * STAGE_UNITS, at.tile * (RB * WN), full + 8 * s);
    };
    auto load_x = [&](int j) {
      const int s = j % STAGES;
      if (!ONE_ROW) tensor_copy(ring + s * STAGE, &p.x_map, blockIdx.y * COLS, at.stage * (STAGE_K / 64), full + 8 * s);
    };
    const int ahead = min(STAGES, count);
    if (lane == 0) {
      fetch_map(&p.w_map);
      if (!ONE_ROW) fetch_map(&p.x_map);
#pragma unroll 1
      for (int j = 0; j < ahead; ++j, at.advance(p.stages)) {
        // What consumers load of X would wait behind all that is asked for.
        if (ONE_ROW && j >= IN_FLIGHT) barrier_wait(full + 8 * (j - IN_FLIGHT), 0);
        load_w(j);
      }
      if (!ONE_ROW) {
        wait_for_previous_kernel();
        at = start;
#pragma unroll 1
        for (int j = 0; j < ahead; ++j, at.advance(p.stages)) load_x(j);
      }
#pragma unroll 1
      for (int j = ahead; j < count; ++j, at.advance(p.stages)) {
        barrier_wait(empty + 8 * (j % STAGES), (j / STAGES & 1) ^ 1);
        load_w(j);
        load_x(j);
      }
      begin_next_kernel(); // not before: what it loads early would delay what this one waits for
    }
    return;
  }
#endif
  // What the end of the first tile reads: what no kernel writes need not wait.
  auto own_column = [&](int tile) { return tid < width && tile * width + tid < columns ? tile * width + tid : -1; };
  Column column = {};
  const int first_column = own_column(start.tile);
  if (first_column >= 0) {
    if (ONE_ROW) column = column_of(first_column);
    else {
      fetch(p.scale + first_column);
      if (p.gate_blocks) fetch(p.scale + columns + first_column);
      if (p.residual) fetch(p.norm_weight + first_column);
    }
  }
  wait_for_previous_kernel();
#if ONE_ROW
  // Everything is asked for before anything is waited for.
  if (first_column >= 0 && p.residual) column.residual = p.residual[first_column];
  const int parts = p.x_squares ? p.k / (4 * SUMMED) : 0, chunks = p.k_units * 16;
  auto part = [&](int i) { return i < parts ? sum_of(__ldcg((const float4 *)p.x_squares + i)) : 0.f; };
  float squares = part(tid);
#pragma unroll 1
  for (int i = tid; i < chunks; i += 4 * CONSUMERS) {
    uint4 v[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) v[u] = i + u * CONSUMERS < p.k / 8 ? __ldcg((const uint4 *)p.x + i + u * CONSUMERS) : uint4{};
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (i + u * CONSUMERS < chunks)
        ((uint4 *)(smem + CONTROL))[i + u * CONSUMERS] = {raised(v[u].x), raised(v[u].y), raised(v[u].z), raised(v[u].w)};
  }
#pragma unroll 1
  for (int i = tid + CONSUMERS; i < parts; i += CONSUMERS) squares += part(i);
  squares = warp_sum(squares);
  if (lane == 0) x_scale[1 + warp] = squares;
  if (tid < 4) ((u32 *)(smem + ZEROS))[tid] = 0;
  consumers_sync();
#endif
#if !BULK
  const u16 *const x = p.x + (long long)blockIdx.y * COLS * p.x_stride;
  Place issued = start;
  auto issue = [&](int j) {
    if (j < count) {
      const u32 to = ring + j % STAGES * STAGE;
      const int units = min(STAGE_UNITS, p.k_units - issued.stage * STAGE_UNITS);
      for (int i = tid; i < STAGE_W / 16; i += THREADS) {
        const int piece = i / (STAGE_UNITS * (UNIT / 16)), c = i % (STAGE_UNITS * (UNIT / 16));
        const int in_gates = issued.tile * (RB * WN / 2) + piece;
        const int from = !p.gate_blocks          ? issued.tile * (RB * WN) + piece
                         : piece < RB * WN / 2 ? in_gates
                                                 : in_gates - RB * WN / 2 + p.gate_blocks;
        const int row_block = min(from, p.row_blocks - 1);
        if (c < units * (UNIT / 16)) copy16(to + STAGE_X + i * 16, p.w + ((long long)row_block * p.k_units + issued.stage * STAGE_UNITS) * UNIT + c * 16, 16);
      }
      for (int i = tid; !ONE_ROW && i < m * (STAGE_K / 8); i += THREADS) {
        const int row = i / (STAGE_K / 8), c = i % (STAGE_K / 8), at_k = issued.stage * STAGE_K + c * 8;
        copy16(to + (c / 8 * COLS + row) * 128 + ((c ^ row) & 7) * 16, x + row * p.x_stride + min(at_k, p.k - 8), at_k < p.k ? 16 : 0);
      }
      issued.advance(p.stages);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  for (int j = 0; j < STAGES - 1; ++j) issue(j);
#endif
  if (!ONE_ROW && p.x_squares) // read behind the barrier at the first tile's end
    for (int row = warp; row < m; row += WN * WK) {
      const float4 *const squares = (const float4 *)(p.x_squares + (long long)(blockIdx.y * COLS + row) * (p.k / SUMMED));
      float sum = 0.f;
      for (int i = lane; i < p.k / (4 * SUMMED); i += 32) sum += sum_of(__ldcg(squares + i));
      sum = warp_sum(sum);
      if (lane == 0) x_scale[row] = rsqrtf(sum / p.k + p.x_eps);
    }

  Sums sums(lane, m, smem);
  Place at = start;
  int buffer = 0;
  for (int j = 0; j < count; ++j) {
    const int s = j % STAGES;
    const char *const from = smem + CONTROL + x_bytes + s * STAGE;
#if BULK
    barrier_wait(full + 8 * s, j / STAGES & 1);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    issue(j + STAGES - 1);
#endif
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int local = u * WK + wk;
      if (at.stage * STAGE_UNITS + local >= p.k_units) break;
      const char *const unit = from + STAGE_X + (wn * RB * STAGE_UNITS + local) * UNIT;
      sums.add(unit, ONE_ROW ? smem + CONTROL + (at.stage * STAGE_UNITS + local) * 256 : from + local * (2 * COLS * 128));
    }
#if BULK
    __syncwarp();
    if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + 8 * s) : "memory");
#endif
#if ONE_ROW
    if (j == 0 && warp == 0) { // not where all wait; read behind the barrier at the tile's end
      squares = warp_sum(lane < WN * WK ? x_scale[1 + lane] : 0.f);
      if (lane == 0) x_scale[0] = rsqrtf(squares / p.k + p.x_eps);
    }
#endif
    const int tile = at.tile;
    at.advance(p.stages);
    const bool whole = at.tile != tile; // up to the tile's end
    if (!whole && j + 1 < count) continue;

    float *const mine = red + buffer * RED;
    sums.move(mine + wk * SUMS * RED_PITCH + wn * RB * 16, m);
    const bool later = CUT && tile == start.tile && start.stage > 0; // another block has the tile's first stages
    int end = range + 1;
    if (CUT && !whole && !later)
      for (; begin(end) < (tile + 1) * p.stages; ++end)
        if (tid == 0) take(p.ready + end);
    consumers_sync();
    auto total = [&](int row, int place) { // of x and of weights in the tile; of all blocks, where not `later`
      float v = 0.f;
#pragma unroll
      for (int i = 0; i < WK; ++i) v += mine[(i * SUMS + row) * RED_PITCH + place];
      v *= UNITS_OF_SUMS;
      for (int r = range + 1; r < end; ++r) v += __ldcg(p.partial + r * (COLS * ROWS) + row * ROWS + place);
      return v;
    };
    if (later)
      for (int e = tid; e < m * ROWS; e += CONSUMERS) __stcg(p.partial + range * (COLS * ROWS) + e, total(e / ROWS, e % ROWS));
    else
      for (int begin = warp * 32; begin < m * width; begin += CONSUMERS) {
        const int e = begin + lane, row = p.gate_blocks ? e / (ROWS / 2) : e / ROWS, place = e - row * width;
        const int n = tile * width + place;
        const bool valid = e < m * width && n < columns;
        const long long y_row = blockIdx.y * COLS + row, to = y_row * columns + n;
        float v = 0.f;
        Column c = column;
        if (valid) {
          if (!ONE_ROW) {
            c = column_of(n);
            if (p.residual) c.residual = p.residual[to];
          }
          const float factor = p.x_squares ? x_scale[row] : 1.f;
          v = total(row, place) * (factor * c.scale[0]) + widen(c.bias[0]);
          if (p.gate_blocks) {
            v = rounded(v);
            v = rounded(v / (1.f + expf(-v))) * rounded(total(row, ROWS / 2 + place) * (factor * c.scale[1]) + widen(c.bias[1]));
          }
        }
        if (p.residual) {
          v = valid ? rounded(rounded(v) + widen(c.residual)) : 0.f;
          float square = v * v; // half a warp has neighbouring columns of a row
#pragma unroll
          for (int o = SUMMED / 2; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
          if (valid) {
            p.residual[to] = narrow(v);
            if (lane % SUMMED == 0) p.squares[y_row * (columns / SUMMED) + n / SUMMED] = square;
          }
          v *= widen(c.norm_weight);
        }
        if (valid) p.y[to] = narrow(v);
      }
    if (RED_BUFFERS == 1 || later) consumers_sync();
    if (later && tid == 0) give(p.ready + range);
    buffer ^= RED_BUFFERS - 1;
    if (const int n = own_column(at.tile); ONE_ROW && j + 1 < count && n >= 0) {
      column = column_of(n);
      if (p.residual) column.residual = p.residual[n];
    }
  }
#if !BULK
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
