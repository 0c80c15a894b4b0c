// What the kernels of w4a16_small.cu and w4a16_wgmma.cu share; put in front of either by w4a16.py, behind pdl.cuh
// and values.cuh.

#ifndef BULK // bulk and tensor copies that complete on mbarriers, programmatic dependent launch
#define BULK (__CUDA_ARCH__ >= 900)
#endif
#define UNIT 1152
#define PIECE(g, t) (((g) * 4 + ((t) ^ ((g) >> 1 & 3))) * 16) // in a step: the codes of rows g and g + 8, k 16 t up
#define CONTROL 1024 // bytes of shared memory for barriers, which keeps what follows aligned for the swizzle
#if TYPE
#define TYPES "f16.f16"
#else
#define TYPES "bf16.bf16"
#endif

struct alignas(64) TensorMap {
  char opaque[128];
};

__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 d;
#if TYPE
  asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#elif __CUDA_ARCH__ >= 900
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u)); // plus -0
#endif
  return d;
}

// A half of a register as both halves: costs nothing, the multiplication names the half.
__device__ __forceinline__ u32 low2(u32 v) {
  u32 d;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(d) : "r"(v));
  return d;
}

__device__ __forceinline__ u32 high2(u32 v) {
  u32 d;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(d) : "r"(v));
  return d;
}

// The A fragment of a product out of a word: e2m1 values, in bfloat16 times 2^-126, in float16 times 2^-14.
__device__ __forceinline__ void spread(u32 q, u32 *w) {
#if TYPE
  w[0] = (q << 6) & 0x8E008E00u;
  w[1] = (q << 9) & 0x8E008E00u;
  w[2] = (q & 0x08000800u) | ((q << 2) & 0x86008600u);
  w[3] = (q & 0x84008400u) | ((q >> 3) & 0x0A000A00u);
#else
  w[0] = (q << 6) & 0x81C081C0u;
  w[1] = __funnelshift_r(q, q, 4) & 0x81C081C0u;
  w[2] = (q << 2) & 0x81C081C0u;
  w[3] = (q & 0x81808180u) | ((q >> 8) & 0x00400040u);
#endif
}

// The same times the scales of its two rows, times 2^-7, exactly: six significant bits, no exponent out of range.
__device__ __forceinline__ void dequantize(u32 q, u32 scales, u32 *w) {
  const u32 s0 = low2(scales), s1 = high2(scales);
  spread(q, w);
  w[0] = mul2(w[0], s0);
  w[1] = mul2(w[1], s1);
  w[2] = mul2(w[2], s0);
  w[3] = mul2(w[3], s1);
}

// Scales of rows g and g + 8 of step `half`, subnormal ones too, times the power of two that brings e2m1 bits to
// value * 2^-7.
__device__ __forceinline__ u32 decode_scales(u32 bytes, int half) {
#if TYPE
  return mul2((half ? bytes >> 1 : bytes << 7) & 0x3F803F80u, 0x78007800u);
#else
  return mul2(mul2((half ? bytes >> 4 : bytes << 4) & 0x07F007F0u, 0x7F007F00u), 0x77807780u);
#endif
}

#if BULK
__device__ __forceinline__ void bulk_copy(u32 to, const void *from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void fetch_map(const TensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

__device__ __forceinline__ void tensor_copy(u32 to, const TensorMap *map, int c1, int c2, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
               "l"(map), "n"(0), "r"(c1), "r"(c2), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(barrier),
               "r"(parity)
               : "memory");
}
#endif

__device__ __forceinline__ void copy16(u32 to, const void *from, u32 bytes) { // the rest of 16 bytes becomes zero
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

