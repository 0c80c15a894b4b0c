// Values of TYPE (0: bfloat16, 1: float16, 2: float32), and what more than one source computes with them. pdl.cuh is
// put in front of it.
#if TYPE == 2
typedef float T;
__device__ __forceinline__ float widen(T v) { return v; }
__device__ __forceinline__ T narrow(float v) { return v; }
#else
typedef u16 T;
__device__ __forceinline__ float widen(T v) {
#if TYPE == 1
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
  return r;
#else
  return __uint_as_float((u32)v << 16);
#endif
}
__device__ __forceinline__ T narrow(float v) {
  u16 r;
#if TYPE == 1
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
#endif
  return r;
}
#endif

__device__ __forceinline__ float rounded(float v) { return widen(narrow(v)); }

__device__ __forceinline__ float warp_sum(float v) { // the same bits in every lane
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

// x of a rotated head; y is the value of the other half that belongs to it. Rounded twice, as torch does.
__device__ __forceinline__ T rotated(T x, T y, T cos, T signed_sin) {
  return narrow(fmaf(widen(y), widen(signed_sin), rounded(widen(x) * widen(cos))));
}

#if TYPE != 2 // the same of two values in a word
template <bool HALF> __device__ __forceinline__ u32 pair_of(float low, float high) {
  u32 r;
  if (HALF)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ float2 both(u32 pair) { return {widen((u16)pair), widen((u16)(pair >> 16))}; }

__device__ __forceinline__ u32 rotated_pair(u32 x, u32 y, u32 cos, u32 signed_sin) {
  const float2 a = both(x), b = both(y), c = both(cos), s = both(signed_sin);
  const float2 sum = both(pair_of<TYPE == 1>(a.x * c.x, a.y * c.y));
  return pair_of<TYPE == 1>(fmaf(b.x, s.x, sum.x), fmaf(b.y, s.y, sum.y));
}

__device__ __forceinline__ void rotate_pairs(u32 &low, u32 &high, u32 cos, u32 sin) { // of a head's two halves
  const u32 x = low;
  low = rotated_pair(x, high, cos, sin);
  high = rotated_pair(high, x, cos, sin ^ 0x80008000u);
}
#endif

// Nearest even, with NaN's sign kept, as torch converts; |v| <= 448 or NaN. Without branches, which lanes would take
// differently.
__device__ __forceinline__ u8 to_e4m3(float v) {
  const u32 bits = __float_as_uint(v), magnitude = bits & 0x7FFFFFFFu, sign = bits >> 24 & 0x80u;
  // Below 2^-6: a multiple of 2^-9, which the sum with 2^14 rounds to.
  const u32 small = __float_as_uint(__uint_as_float(magnitude) + 16384.f) - (141u << 23);
  const u32 large = (magnitude - (120u << 23) + 0x7FFFFu + (magnitude >> 20 & 1)) >> 20;
  return sign | (magnitude > 0x7F800000u ? 0x7Fu : magnitude < 121u << 23 ? small : large);
}

// What a cache in e4m3 holds of v.
__device__ __forceinline__ u8 saturated_e4m3(T v, float inverse_scale) {
  const float scaled = widen(v) * inverse_scale;
  return to_e4m3(scaled > 448.f ? 448.f : scaled < -448.f ? -448.f : scaled);
}
