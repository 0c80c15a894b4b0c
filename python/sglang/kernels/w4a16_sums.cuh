// What a warp of w4a16_small.cu sums: the products of its units of RB blocks of 16 rows with X. w4a16_common.cuh is put in
// front of it.
//
// For one row of X the seven other columns of an mma take apart what the scales differ for: column c has X for block c of
// a unit, whose 8 blocks of 16 k lie in 4 lanes and 2 steps, and zeros for the others. So the sums are multiplied by the
// scales, once a unit, instead of the weights.
#define ROWS (16 * RB * WN)
#define COLS (8 * NB)
#define CONSUMERS (32 * WN * WK)
#if BULK
#define THREADS (CONSUMERS + 32)
#else
#define THREADS CONSUMERS
#endif
#define STAGE_UNITS (U * WK)
#define STAGE_K (128 * STAGE_UNITS)
#define STAGE_W (RB * WN * STAGE_UNITS * UNIT)
#if ONE_ROW
#define STAGE_X 0
#else
#define STAGE_X (COLS * 2 * STAGE_K)
#endif
#define STAGE (STAGE_X + (STAGE_W + 1023) / 1024 * 1024)
#if ONE_ROW && CONSUMERS < ROWS
#error "a thread reads ahead for one value of a tile"
#endif
#define RED_PITCH (ROWS + 4)
#define IN_FLIGHT (STAGE_W < 20480 ? 2 : 1) // stages that are asked for at once before there is an X
#define SUMS (ONE_ROW ? 1 : COLS) // that a warp has of a row of weights
#define RED (WK * SUMS * RED_PITCH)
#define RED_BUFFERS (RED <= 4096 ? 2 : 1)

#define ZEROS (CONTROL - 16) // where 16 bytes of zeros lie in shared memory, for ONE_ROW
#define SUMMED 16            // squares in a sum

__device__ __forceinline__ void mma(float *c, const u32 *a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPES ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if ONE_ROW
#if TYPE
#define UNITS_OF_SUMS 16384.f // 2^14
__device__ __forceinline__ u32 raised(u32 pair) { return pair; }
#else
// With e2m1 values times 2^-126, float32 would have no room for products below: X is 2^64 times as large. So its values
// from 2^-63 up to 2^64 have exact products.
#define UNITS_OF_SUMS __uint_as_float(189u << 23) // 2^62
__device__ __forceinline__ u32 raised(u32 pair) { return mul2(pair, 0x5F805F80u); }
#endif

__device__ __forceinline__ float scale_of(u32 bits) { // e4m3 at bit 20, beside others
  return __uint_as_float(bits & 0x07F00000u) * __uint_as_float(247u << 23); // 2^120: the exponents' biases are 7 and 127
}

struct Sums {
  float sum[RB][2] = {}; // of rows g and g + 8, of two columns
  const char *const zeros;
  const int g, t;

  __device__ __forceinline__ Sums(int lane, int, const char *smem) : zeros(smem + ZEROS), g(lane >> 2), t(lane & 3) {}

  __device__ __forceinline__ void add(const char *unit, const char *x) { // 128 values of X behind each other
    uint4 xv[2][2];                                                      // of both steps, k 0..7 and 8..15 of block t
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i) xv[half][i] = *(const uint4 *)(g == t + 4 * half ? x + half * 128 + t * 32 + i * 16 : zeros);
#pragma unroll
    for (int r = 0; r < RB; ++r, unit += STAGE_UNITS * UNIT) {
      float c[4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 q = *(const uint4 *)(unit + half * 512 + PIECE(g, t));
        const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          u32 v[4], w[4];
          spread(words[i], v);
          spread(words[i + 1], w);
          const u32 lower[4] = {v[0], v[1], w[0], w[1]}, upper[4] = {v[2], v[3], w[2], w[3]};
          mma(c, lower, i ? xv[half][0].z : xv[half][0].x, i ? xv[half][0].w : xv[half][0].y);
          mma(c, upper, i ? xv[half][1].z : xv[half][1].x, i ? xv[half][1].w : xv[half][1].y);
        }
      }
      // The scales of columns 2 t and 2 t + 1, which are with lanes 2 t and 2 t + 1 of the first or second step.
      const uint2 bytes = *(const uint2 *)(unit + 1024 + g * 16 + t % 2 * 8);
      const u32 even = bytes.x >> t / 2 * 8, odd = bytes.y >> t / 2 * 8;
      sum[r][0] += c[0] * scale_of(even << 20) + c[1] * scale_of(odd << 20);
      sum[r][1] += c[2] * scale_of(even << 4) + c[3] * scale_of(odd << 4);
    }
  }

  __device__ __forceinline__ void move(float *to, int) {
#pragma unroll
    for (int r = 0; r < RB; ++r)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float v = sum[r][i];
        v += __shfl_xor_sync(~0u, v, 1);
        v += __shfl_xor_sync(~0u, v, 2);
        if (t == 0) to[r * 16 + g + i * 8] = v;
        sum[r][i] = 0.f;
      }
  }
};
#else
#define UNITS_OF_SUMS 128.f

struct Sums {
  float sum[RB][NB][4] = {};
  const int lane, g, t, x_lane;

  // The swizzle. Rows past M are nobody's; where there is one block of 8, reading M - 1 instead spares bandwidth.
  static __device__ __forceinline__ int place(int line, int t) { return line * 128 + ((2 * t) ^ line) * 16; }
  __device__ __forceinline__ Sums(int lane, int m, const char *)
      : lane(lane), g(lane >> 2), t(lane & 3), x_lane(place(NB == 1 ? min(g, m - 1) : g, t)) {}

  __device__ __forceinline__ void add(const char *unit, const char *x) { // [2][COLS][64] values of X, 128-byte swizzle
    u32 bytes[RB];
#pragma unroll
    for (int r = 0; r < RB; ++r) bytes[r] = *(const u32 *)(unit + r * (STAGE_UNITS * UNIT) + 1024 + lane * 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 xv[NB][2]; // k 0..7 and 8..15 of block t
#pragma unroll
      for (int b = 0; b < NB; ++b)
#pragma unroll
        for (int i = 0; i < 2; ++i) xv[b][i] = *(const uint4 *)(x + half * (COLS * 128) + b * 1024 + (x_lane ^ i * 16));
#pragma unroll
      for (int r = 0; r < RB; ++r) {
        const uint4 q = *(const uint4 *)(unit + r * (STAGE_UNITS * UNIT) + half * 512 + PIECE(g, t));
        const u32 scales = decode_scales(bytes[r], half);
        const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int i = 0; i < 4; i += 2) { // two words make two fragments whose k are neighbours in X's registers
          u32 v[4], w[4];
          dequantize(words[i], scales, v);
          dequantize(words[i + 1], scales, w);
          const u32 lower[4] = {v[0], v[1], w[0], w[1]}, upper[4] = {v[2], v[3], w[2], w[3]};
#pragma unroll
          for (int b = 0; b < NB; ++b) {
            mma(sum[r][b], lower, i ? xv[b][0].z : xv[b][0].x, i ? xv[b][0].w : xv[b][0].y);
            mma(sum[r][b], upper, i ? xv[b][1].z : xv[b][1].x, i ? xv[b][1].w : xv[b][1].y);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void move(float *to, int m) {
#pragma unroll
    for (int r = 0; r < RB; ++r)
#pragma unroll
      for (int b = 0; b < NB; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (b * 8 < m) to[(b * 8 + 2 * t + (i & 1)) * RED_PITCH + r * 16 + g + (i & 2) * 4] = sum[r][b][i];
          sum[r][b][i] = 0.f;
        }
  }
};
#endif

