// float32 vectors as wide as the machine's, on the compiler's vector extensions; float32, bfloat16 and e4m3 in memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
static constexpr int LANES = 16;
#elif defined(__AVX2__)
static constexpr int LANES = 8;
#else
static constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

struct Bf16 {
  uint16_t b;
};
struct E4m3 {
  uint8_t b;
};

#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL16 _Pragma("GCC unroll 16")

static inline Vec splat(float v) { return v - Vec{}; }  // -0 stays -0
static inline Bits bits_of(Vec v) { return reinterpret_cast<Bits>(v); }
static inline Vec floats_of(Bits v) { return reinterpret_cast<Vec>(v); }
static inline Vec select(Ints mask, Vec a, Vec b) {
  const Bits m = reinterpret_cast<Bits>(mask);
  return floats_of((bits_of(a) & m) | (bits_of(b) & ~m));
}
static inline Vec larger(Vec a, Vec b) {  // b where one is NaN
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return select(a > b, a, b);
#endif
}
static inline Vec smaller(Vec a, Vec b) {  // likewise
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return select(a < b, a, b);
#endif
}
static inline Ints lane_numbers() {
  Ints numbers{};
  for (int i = 0; i < LANES; ++i) numbers[i] = i;
  return numbers;
}

static inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

static inline float sum(Vec v) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 w = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
  const __m256 w = v;
#endif
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
#else
  float total = v[0];
  for (int i = 1; i < LANES; ++i) total += v[i];
  return total;
#endif
}

// out[n] = sum(v[n]) in the order that suits four of them.
static inline void sum4(const Vec* v, float* out) {
#if defined(__AVX2__)
  __m256 w[4];
  UNROLL for (int n = 0; n < 4; ++n)
#if defined(__AVX512F__)
    w[n] = _mm256_add_ps(_mm512_castps512_ps256(v[n]), _mm512_extractf32x8_ps(v[n], 1));
#else
    w[n] = v[n];
#endif
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(w[0], w[1]), _mm256_hadd_ps(w[2], w[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  for (int n = 0; n < 4; ++n) out[n] = sum(v[n]);
#endif
}

static inline float largest(Vec v) {  // of values that are not NaN
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 w = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
  const __m256 w = v;
#endif
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
#else
  float best = v[0];
  for (int i = 1; i < LANES; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

// ------------------------------------------------------------------------------------------------------------- memory
static inline Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline Vec load(const Bf16* p) {
#if defined(__AVX512F__)
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
#elif defined(__AVX2__)
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
#else
  Halves h;
  memcpy(&h, p, sizeof h);
  return floats_of(__builtin_convertvector(h, Bits) << 16);
#endif
}

static inline Vec load(const E4m3* p) {
  Bytes bytes;
  memcpy(&bytes, p, sizeof bytes);
  const Bits b = __builtin_convertvector(bytes, Bits), magnitude = b & 0x7F;
  const Vec normal = floats_of((magnitude << 20) + (120u << 23));
  const Vec subnormal = __builtin_convertvector(reinterpret_cast<Ints>(magnitude), Vec) * (1.0f / 512);
  Bits v = bits_of(select(magnitude < 8, subnormal, normal)) | (b & 0x80) << 24;
  return floats_of(v | reinterpret_cast<Bits>(magnitude == 0x7F));  // NaN
}

static inline void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

static inline void store(Bf16* p, Vec v) {
  const Bits b = bits_of(v);
  const Bits rounded = (b + 0x7FFFu + ((b >> 16) & 1)) >> 16;
  const Bits nan = reinterpret_cast<Bits>(v != v);
  const Halves h = __builtin_convertvector((rounded & ~nan) | (0x7FC0u & nan), Halves);
  memcpy(p, &h, sizeof h);
}

// Saturates, keeps NaN.
static inline void store(E4m3* p, Vec v) {
  const Bits b = bits_of(v), magnitude = b & 0x7FFFFFFFu;
  const Bits normal = (magnitude - (120u << 23) + 0x7FFFFu + ((magnitude >> 20) & 1)) >> 20;
  const Bits subnormal = bits_of(floats_of(magnitude) + 24576.0f) - 0x46C00000u;  // its last bit is worth 2^-9
  const Bits small = reinterpret_cast<Bits>(magnitude < 0x3C800000u), big = reinterpret_cast<Bits>(magnitude > 0x43E00000u);
  const Bits nan = reinterpret_cast<Bits>(magnitude > 0x7F800000u);
  Bits byte = (subnormal & small) | (normal & ~small & ~big) | (0x7Eu & big);
  byte = (byte & ~nan) | (0x7Fu & nan) | ((b >> 24) & 0x80);
  const Bytes bytes = __builtin_convertvector(byte, Bytes);
  memcpy(p, &bytes, sizeof bytes);
}

// `count` values, fewer than LANES; zeros behind them.
template <class T>
static inline Vec load(const T* p, int64_t count) {
  T whole[LANES] = {};
  memcpy(whole, p, count * sizeof(T));
  return load(whole);
}
template <class T>
static inline void store(T* p, Vec v, int64_t count) {
  T whole[LANES];
  store(whole, v);
  memcpy(p, whole, count * sizeof(T));
}

static inline void put(float* p, float v) { *p = v; }
static inline void put(Bf16* p, float v) { store(p, splat(v), 1); }

// What storing v and reading it again gives.
template <class T>
static inline Vec rounded(Vec v) {
  T stored[LANES];
  store(stored, v);
  return load(stored);
}
template <>
inline Vec rounded<float>(Vec v) {
  return v;
}
template <>
inline Vec rounded<Bf16>(Vec v) {
  const Bits b = bits_of(v);
  const Bits kept = (b + 0x7FFFu + ((b >> 16) & 1)) & 0xFFFF0000u;
  return select(v != v, v, floats_of(kept));
}

// f(index, number of values) for pieces of `count` values; the last may be shorter than LANES.
template <class F>
static inline void pieces(int64_t count, F f) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) f(i, static_cast<int64_t>(LANES));
  if (i < count) f(i, count - i);
}
template <class T>
static inline Vec load_some(const T* p, int64_t count) {
  return count == LANES ? load(p) : load(p, count);
}
template <class T>
static inline void store_some(T* p, Vec v, int64_t count) {
  if (count == LANES)
    store(p, v);
  else
    store(p, v, count);
}

// The first and the second half of a's values, each followed by b's of the same place.
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif
static inline Vec interleave_first(Vec a, Vec b) {
#if defined(__AVX512F__)
  return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
  return SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
  return SHUFFLE(a, b, 0, 4, 1, 5);
#endif
}
static inline Vec interleave_second(Vec a, Vec b) {
#if defined(__AVX512F__)
  return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
  return SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}

// rows[i][j] and rows[j][i] change places.
static inline void transpose(Vec* rows) {
  UNROLL for (int round = 1; round < LANES; round *= 2) {
    Vec next[LANES];
    UNROLL for (int i = 0; i < LANES / 2; ++i) {
      next[2 * i] = interleave_first(rows[i], rows[i + LANES / 2]);
      next[2 * i + 1] = interleave_second(rows[i], rows[i + LANES / 2]);
    }
    UNROLL16 for (int i = 0; i < LANES; ++i) rows[i] = next[i];
  }
}

// ---------------------------------------------------------------------------------------------------------------- exp
// Within 2 units in the last place; infinity and NaN as they should be; 0 below exp(-87), near the least normal number:
// subnormal results take a processor a hundred cycles each.
static inline Vec exp(Vec x) {
  const Vec clamped = larger(splat(-87.0f), smaller(splat(89.0f), x));
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec biased = fma(clamped, splat(1.44269504f), magic);
  const Vec n = biased - magic;
  const Vec r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
  Vec y = fma(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
  y = fma(y, r, splat(8.3334519073e-3f));
  y = fma(y, r, splat(4.1665795894e-2f));
  y = fma(y, r, splat(1.6666665459e-1f));
  y = fma(y, r, splat(5.0000001201e-1f));
  y = fma(y, r * r, r) + 1.0f;
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, splat(-87.0f), _CMP_NLT_UQ), y, n);
#else
  const Ints exponent = reinterpret_cast<Ints>(bits_of(biased)) - 0x4B400000;
  const Ints half = exponent >> 1;  // in two steps: 2^exponent may not be finite
  y = y * floats_of(reinterpret_cast<Bits>((half + 127) << 23)) *
      floats_of(reinterpret_cast<Bits>((exponent - half + 127) << 23));
  return select(x < -87.0f, Vec{}, y);
#endif
}

// --------------------------------------------------------------------------------------------------------------- dots
// out[m][n] = a[m] . b[n] over `count` values, for MR rows of a and 4 of b. The order of additions is that of one pair:
// LANES running sums, then their sum.
template <int MR, class T>
static inline void dots(const float* const* a, const T* const* b, int64_t count, float (*out)[4]) {
  Vec sums[MR][4] = {};
  auto step = [&](int64_t i, auto get_a, auto get_b) __attribute__((always_inline)) {
    Vec x[MR];
    UNROLL for (int m = 0; m < MR; ++m) x[m] = get_a(a[m] + i);
    UNROLL for (int n = 0; n < 4; ++n) {
      const Vec w = get_b(b[n] + i);
      UNROLL for (int m = 0; m < MR; ++m) sums[m][n] = fma(x[m], w, sums[m][n]);
    }
  };
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    step(i, [](const float* p) { return load(p); }, [](const T* p) { return load(p); });
  if (const int64_t rest = count - i)
    step(i, [=](const float* p) { return load(p, rest); }, [=](const T* p) { return load(p, rest); });
  UNROLL for (int m = 0; m < MR; ++m) sum4(sums[m], out[m]);
}
static constexpr int DOT_ROWS = LANES == 16 ? 6 : 3;  // as many as there are registers for
