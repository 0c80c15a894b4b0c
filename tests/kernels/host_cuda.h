// CUDA C++ on a CPU, for tests: the threads of a block are coroutines, blocks run one after the other. What the kernels
// of host_cuda.py use is here, nothing else.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__ alignas

struct Dim {
  unsigned x, y, z;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct float2 {
  float x, y;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
static Dim threadIdx, blockIdx, blockDim, gridDim;

namespace host {
enum Level { WARP, BLOCK };
struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  bool ended;
  int arrivals[2];  // at barriers of each level
};
static std::vector<Thread> threads;
static ucontext_t scheduler;
static unsigned current;
static std::function<void()> body;
static uint64_t exchanged[1024];
alignas(1024) static char shared[227 << 10];  // dynamic; an address of it is an offset

static void entry() {
  body();
  threads[current].ended = true;
  swapcontext(&threads[current].context, &scheduler);
}

static void barrier(Level level) {
  Thread& me = threads[current];
  const unsigned first = level == WARP ? current / 32 * 32 : 0, last = level == WARP ? first + 32 : blockDim.x;
  ++me.arrivals[level];
  for (unsigned i = first; i < last && i < blockDim.x; ++i)
    while (!threads[i].ended && threads[i].arrivals[level] < me.arrivals[level]) swapcontext(&me.context, &scheduler);
}

extern "C" void (*host_previous)(bool ended) = nullptr;
static void (*&previous)(bool ended) = host_previous;  // null, or called as a block begins and when all its threads wait
static void wait_for_previous() {
  if (!previous) return;
  barrier(BLOCK);
  if (current == 0) previous(true);
  barrier(BLOCK);
}

static void launch(Dim grid, unsigned size, std::function<void()> kernel) {
  body = kernel, gridDim = grid, blockDim = {size, 1, 1};
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = {x, y, 0};
      if (previous) previous(false);
      if (threads.size() < size) threads.resize(size);
      for (unsigned i = 0; i < size; ++i) {
        Thread& t = threads[i];
        t.stack.resize(1 << 15);
        t.ended = false, t.arrivals[WARP] = t.arrivals[BLOCK] = 0;
        getcontext(&t.context);
        t.context.uc_stack.ss_sp = t.stack.data(), t.context.uc_stack.ss_size = t.stack.size();
        makecontext(&t.context, entry, 0);
      }
      for (bool running = true; running;) {
        running = false;
        for (current = 0; current < size; ++current) {
          if (threads[current].ended) continue;
          running = true;
          threadIdx = {current, 0, 0};
          swapcontext(&scheduler, &threads[current].context);
        }
      }
    }
}

static float from_half(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const float v = exponent == 31 ? (mantissa ? NAN : INFINITY)
                                 : exponent ? std::ldexp(1024.f + mantissa, exponent - 25) : std::ldexp(float(mantissa), -24);
  return h >> 15 ? -v : v;
}

static uint16_t to_half(float v) {
  const uint16_t sign = std::signbit(v) << 15;
  if (v != v) return 0x7FFF;
  const float a = std::fabs(v);
  if (a >= 65520.f) return sign | 0x7C00;
  const int exponent = a < 0x1p-14f ? -14 : std::ilogb(a);
  const int q = std::nearbyint(std::ldexp(a, 10 - exponent));
  return sign | (q < 1024 ? q : (exponent + 15) * 1024 + q - 1024);
}

static uint16_t to_bf16(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return v != v ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

static float from_bf16(uint16_t h) {
  const uint32_t bits = uint32_t(h) << 16;
  float v;
  memcpy(&v, &bits, 4);
  return v;
}

static uint32_t half_pair(float low, float high) { return to_half(low) | uint32_t(to_half(high)) << 16; }
static uint32_t bf16_pair(float low, float high) { return to_bf16(low) | uint32_t(to_bf16(high)) << 16; }

static uint32_t half_products(uint32_t a, uint32_t b) {
  return half_pair(from_half(a) * from_half(b), from_half(a >> 16) * from_half(b >> 16));
}
static uint32_t bf16_products(uint32_t a, uint32_t b) {
  return bf16_pair(from_bf16(a) * from_bf16(b), from_bf16(a >> 16) * from_bf16(b >> 16));
}

// What thread `from` of the block gives, of the same warp.
template <class V> V exchange(V v, unsigned from) {
  V other;
  memcpy(&exchanged[current], &v, sizeof v);
  barrier(WARP);
  memcpy(&other, &exchanged[from], sizeof v);
  barrier(WARP);
  return other;
}

// movmatrix: lane 4 r + c holds columns 2 c and 2 c + 1 of row r.
static uint32_t transpose(uint32_t v) {
  const unsigned first = current / 32 * 32, row = current % 32 / 4, column = current % 4;
  uint32_t r = 0;
  for (unsigned i = 0; i < 2; ++i)
    r |= (exchange(v, first + 4 * (2 * column + i) + row / 2) >> 16 * (row % 2) & 0xFFFF) << 16 * i;
  return r;
}

struct Operands {
  uint32_t a[4], b[2];
};

// mma.m16n8k16, fragments as the PTX manual draws them; products are summed in float32 in ascending order.
template <float (*widen)(uint16_t)> void multiply(float (&c)[4], Operands mine) {
  static float all[1024][12];
  for (int i = 0; i < 12; ++i) all[current][i] = widen((i < 8 ? mine.a[i / 2] : mine.b[i / 2 - 4]) >> 16 * (i % 2));
  barrier(WARP);
  const unsigned first = current / 32 * 32, row = current % 32 / 4, column = current % 4;
  for (unsigned i = 0; i < 4; ++i)
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned a = 2 * (k / 8 * 2 + i / 2) + k % 2, b = 8 + 2 * (k / 8) + k % 2, held = k % 8 / 2;
      c[i] += all[first + 4 * row + held][a] * all[first + 4 * (2 * column + i % 2) + held][b];
    }
  barrier(WARP);
}
}  // namespace host

template <class V> V __shfl_xor_sync(unsigned, V v, int distance) { return host::exchange(v, host::current ^ distance); }
template <class V> V __shfl_sync(unsigned, V v, int lane) { return host::exchange(v, host::current / 32 * 32 + lane % 32); }
static inline void __syncthreads() { host::barrier(host::BLOCK); }
static inline void __syncwarp() { host::barrier(host::WARP); }
static inline void __threadfence() {}
static inline void __trap() { std::abort(); }
template <class V> V __ldcg(const V* p) { return *p; }
template <class V> void __stcg(V* p, V v) { *p = v; }
static inline unsigned atomicInc(unsigned* p, unsigned most) {
  const unsigned old = *p;
  *p = old >= most ? 0 : old + 1;
  return old;
}
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return r;
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return (uint64_t(high) << 32 | low) >> bits;
}
static inline size_t __cvta_generic_to_shared(const void* p) { return (const char*)p - host::shared; }
static inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __uint_as_float(unsigned bits) {
  float v;
  memcpy(&v, &bits, 4);
  return v;
}
static inline unsigned __float_as_uint(float v) {
  unsigned bits;
  memcpy(&bits, &v, 4);
  return bits;
}
