// Units of w4a16_small.cu as a matrix that cuBLAS takes: e2m1 * e4m3 * 2^-7, exact. A warp writes 16 rows x 64 k.
//
// Macros: TYPE.
struct DequantizeParams {
  const char *w; // [row_blocks][k_units][UNIT]
  u16 *out;      // [16 row_blocks, K]: e2m1 * e4m3 * 2^-7
  int row_blocks, k, k_units;
};

extern "C" __global__ void __launch_bounds__(256) w4a16_dequantize(const __grid_constant__ DequantizeParams p) {
#if BULK
  begin_next_kernel();
  wait_for_previous_kernel(); // which may still read `out`
#endif
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, steps = p.k / 64;
  const long long total = (long long)p.row_blocks * steps;
  for (long long i = blockIdx.x * 8ll + (threadIdx.x >> 5); i < total; i += gridDim.x * 8ll) {
    const int row_block = i / steps, step = i % steps;
    const char *const unit = p.w + ((long long)row_block * p.k_units + step / 2) * UNIT;
    const uint4 q = *(const uint4 *)(unit + (step & 1) * 512 + PIECE(g, t));
    const u32 bytes = *(const u32 *)(unit + 1024 + lane * 4);
    const u32 scales = decode_scales(step & 1 ? bytes >> 8 : bytes, 0);
    u32 w[4][4];
    dequantize(q.x, scales, w[0]);
    dequantize(q.y, scales, w[1]);
    dequantize(q.z, scales, w[2]);
    dequantize(q.w, scales, w[3]);
    uint4 *const upper = (uint4 *)(p.out + ((long long)row_block * 16 + g) * p.k + step * 64 + t * 16);
    uint4 *const lower = (uint4 *)((u16 *)upper + 8ll * p.k);
    upper[0] = make_uint4(w[0][0], w[1][0], w[2][0], w[3][0]);
    upper[1] = make_uint4(w[0][2], w[1][2], w[2][2], w[3][2]);
    lower[0] = make_uint4(w[0][1], w[1][1], w[2][1], w[3][1]);
    lower[1] = make_uint4(w[0][3], w[1][3], w[2][3], w[3][3]);
  }
}

