// One vector type per instruction set, chosen by the compiler's flags. All of them compute the same bits.
//
// A weight register holds 4 consecutive k of LANES rows, one byte each, as 2 * e2m1 + 12 (0..24): unsigned, since the
// dot-product instructions multiply unsigned by signed bytes. The caller takes 12 * sum(a) off again.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

alignas(64) static const uint8_t E2M1_DOUBLED[64] = {
#define TWELVE_PLUS 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
    TWELVE_PLUS, TWELVE_PLUS, TWELVE_PLUS, TWELVE_PLUS,
#undef TWELVE_PLUS
};

// 1.5 * 2^23. An integer below 2^22 added to its bits is the same integer added to its value.
static constexpr float MAGIC = 12582912.0f;
static constexpr int32_t MAGIC_BITS = 0x4B400000;

#define UNROLL _Pragma("GCC unroll 8")

static inline int32_t load_int32(const void* p) {
  int32_t value;
  memcpy(&value, p, 4);
  return value;
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

struct Simd {
  static constexpr int LANES = 16, VECTORS = 2;
  using Int = __m512i;
  using Float = __m512;

  static Float load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Float v) { _mm512_storeu_ps(p, v); }
  static Float broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static Int broadcast(const int32_t* p) { return _mm512_set1_epi32(*p); }
  static Int zero() { return _mm512_setzero_si512(); }
  static Int add(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static Int times_256(Int a) { return _mm512_slli_epi32(a, 8); }
  static Float rounded(Int a) { return _mm512_cvtepi32_ps(a); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float constant(float v) { return _mm512_set1_ps(v); }
  static Float scaled(Int biased, Float s) { return fma(_mm512_castsi512_ps(biased), s, mul(s, constant(-MAGIC))); }

  static void unpack(const uint8_t* codes, Int w[4]) {
    const Int table = _mm512_load_si512(E2M1_DOUBLED);
    UNROLL for (int z = 0; z < 2; ++z) {
      const Int both = _mm512_loadu_si512(codes + 64 * z);
#if defined(__AVX512VBMI__)  // the index's upper bits are ignored: the table repeats
      w[2 * z] = _mm512_permutexvar_epi8(both, table);
      w[2 * z + 1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(both, 4), table);
#else
      const Int low = _mm512_set1_epi8(15);
      w[2 * z] = _mm512_shuffle_epi8(table, _mm512_and_si512(both, low));
      w[2 * z + 1] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
#endif
    }
  }
  static Float scales(const uint8_t* p) {  // as float16 bits, an e4m3 value / 256
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 7));
  }
  static Int load_weights(const uint8_t* p) { return _mm512_load_si512(p); }
  static void store_weights(uint8_t* p, Int w) { _mm512_store_si512(p, w); }
  static Int dot(Int sum, const Int w[4], const int8_t* a) {
    UNROLL for (int q = 0; q < 4; ++q) sum = _mm512_dpbusd_epi32(sum, w[q], _mm512_set1_epi32(load_int32(a + 4 * q)));
    return sum;
  }
};

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct Simd {
  static constexpr int LANES = 8, VECTORS = 1;
  using Int = __m256i;
  using Float = __m256;

  static Float load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Float v) { _mm256_storeu_ps(p, v); }
  static Float broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static Int broadcast(const int32_t* p) { return _mm256_set1_epi32(*p); }
  static Int zero() { return _mm256_setzero_si256(); }
  static Int add(Int a, Int b) { return _mm256_add_epi32(a, b); }
  static Int times_256(Int a) { return _mm256_slli_epi32(a, 8); }
  static Float rounded(Int a) { return _mm256_cvtepi32_ps(a); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float constant(float v) { return _mm256_set1_ps(v); }
  static Float scaled(Int biased, Float s) { return fma(_mm256_castsi256_ps(biased), s, mul(s, constant(-MAGIC))); }

  static void unpack(const uint8_t* codes, Int w[4]) {
    const Int table = load_weights(E2M1_DOUBLED), low = _mm256_set1_epi8(15);
    UNROLL for (int z = 0; z < 2; ++z) {
      const Int both = _mm256_loadu_si256(reinterpret_cast<const Int*>(codes + 64 * z));
      w[2 * z] = _mm256_shuffle_epi8(table, _mm256_and_si256(both, low));
      w[2 * z + 1] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
    }
  }
  static Float scales(const uint8_t* p) {
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtph_ps(_mm_slli_epi16(wide, 7));
  }
  static Int load_weights(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const Int*>(p)); }
  static void store_weights(uint8_t* p, Int w) { _mm256_store_si256(reinterpret_cast<Int*>(p), w); }
  static Int dot(Int sum, const Int w[4], const int8_t* a) {
#if defined(__AVXVNNI__)
    UNROLL for (int q = 0; q < 4; ++q) sum = _mm256_dpbusd_avx_epi32(sum, w[q], _mm256_set1_epi32(load_int32(a + 4 * q)));
    return sum;
#else  // 8 products of at most 24 * 128 to each int16: no overflow
    Int pairs = _mm256_maddubs_epi16(w[0], _mm256_set1_epi32(load_int32(a)));
    UNROLL for (int q = 1; q < 4; ++q)
      pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[q], _mm256_set1_epi32(load_int32(a + 4 * q))));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
  }
};

#elif defined(__ARM_FEATURE_DOTPROD)

struct Simd {
  static constexpr int LANES = 4, VECTORS = 2;
  using Int = int32x4_t;
  using Float = float32x4_t;

  static Float load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, Float v) { vst1q_f32(p, v); }
  static Float broadcast(const float* p) { return vld1q_dup_f32(p); }
  static Int broadcast(const int32_t* p) { return vld1q_dup_s32(p); }
  static Int zero() { return vdupq_n_s32(0); }
  static Int add(Int a, Int b) { return vaddq_s32(a, b); }
  static Int times_256(Int a) { return vshlq_n_s32(a, 8); }
  static Float rounded(Int a) { return vcvtq_f32_s32(a); }
  static Float mul(Float a, Float b) { return vmulq_f32(a, b); }
  static Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  static Float constant(float v) { return vdupq_n_f32(v); }
  static Float scaled(Int biased, Float s) { return fma(vreinterpretq_f32_s32(biased), s, mul(s, constant(-MAGIC))); }

  static void unpack(const uint8_t* codes, Int w[4]) {
    const uint8x16_t table = vld1q_u8(E2M1_DOUBLED);
    UNROLL for (int z = 0; z < 2; ++z) {
      const uint8x16_t both = vld1q_u8(codes + 64 * z);
      w[2 * z] = vreinterpretq_s32_u8(vqtbl1q_u8(table, vandq_u8(both, vdupq_n_u8(15))));
      w[2 * z + 1] = vreinterpretq_s32_u8(vqtbl1q_u8(table, vshrq_n_u8(both, 4)));
    }
  }
  static Float scales(const uint8_t* p) {
    const uint16x4_t wide = vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(load_int32(p)))));
    return vcvt_f32_f16(vreinterpret_f16_u16(vshl_n_u16(wide, 7)));
  }
  static Int load_weights(const uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
  static void store_weights(uint8_t* p, Int w) { vst1q_u8(p, vreinterpretq_u8_s32(w)); }
  static Int dot(Int sum, const Int w[4], const int8_t* a) {
    UNROLL for (int q = 0; q < 4; ++q)
      sum = vdotq_s32(sum, vreinterpretq_s8_s32(w[q]), vreinterpretq_s8_s32(vdupq_n_s32(load_int32(a + 4 * q))));
    return sum;
  }
};

#else  // any CPU; a and b of every fma() below have an exact product, so that two roundings are one

struct Simd {
  static constexpr int LANES = 8, VECTORS = 1;
  struct Int {
    uint32_t v[LANES];
  };
  struct Float {
    float v[LANES];
  };
  template <class R, class F>
  static R each(F f) {
    R r;
    for (int i = 0; i < LANES; ++i) r.v[i] = f(i);
    return r;
  }

  static Float load(const float* p) { return each<Float>([=](int i) { return p[i]; }); }
  static void store(float* p, Float v) { memcpy(p, v.v, sizeof v.v); }
  static Float constant(float v) { return each<Float>([=](int) { return v; }); }
  static Float broadcast(const float* p) { return constant(*p); }
  static Int broadcast(const int32_t* p) { return each<Int>([=](int) { return static_cast<uint32_t>(*p); }); }
  static Int zero() { return Int{}; }
  static Int add(Int a, Int b) { return each<Int>([&](int i) { return a.v[i] + b.v[i]; }); }
  static Int times_256(Int a) { return each<Int>([&](int i) { return a.v[i] << 8; }); }
  static Float rounded(Int a) { return each<Float>([&](int i) { return static_cast<float>(static_cast<int32_t>(a.v[i])); }); }
  static Float mul(Float a, Float b) { return each<Float>([&](int i) { return a.v[i] * b.v[i]; }); }
  static Float scaled(Int biased, Float s) {
    Float f;
    memcpy(f.v, biased.v, sizeof f.v);
    return each<Float>([&](int i) { return (f.v[i] - MAGIC) * s.v[i]; });
  }
  static Float fma(Float a, Float b, Float c) { return each<Float>([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }

  static void unpack(const uint8_t* codes, Int w[4]) {
    uint8_t bytes[4][4 * LANES];
    for (int i = 0; i < 4 * LANES; ++i)
      UNROLL for (int z = 0; z < 2; ++z) {
        bytes[2 * z][i] = E2M1_DOUBLED[codes[64 * z + i] & 15];
        bytes[2 * z + 1][i] = E2M1_DOUBLED[codes[64 * z + i] >> 4];
      }
    memcpy(w, bytes, sizeof bytes);
  }
  static Float scales(const uint8_t* p) {
    return each<Float>([=](int i) {
      const int exponent = p[i] >> 3, mantissa = p[i] & 7;
      const float step = 1.0f / (1 << 17);  // of subnormals, divided by 256
      return exponent ? static_cast<float>((8 + mantissa) << (exponent - 1)) * step : mantissa * step;
    });
  }
  static Int load_weights(const uint8_t* p) {
    Int w;
    memcpy(w.v, p, sizeof w.v);
    return w;
  }
  static void store_weights(uint8_t* p, Int w) { memcpy(p, w.v, sizeof w.v); }
  static Int dot(Int sum, const Int w[4], const int8_t* a) {
    for (int q = 0; q < 4; ++q) {
      uint8_t bytes[4 * LANES];
      memcpy(bytes, w[q].v, sizeof bytes);
      for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < 4; ++j) sum.v[i] += static_cast<uint32_t>(bytes[4 * i + j] * a[4 * q + j]);
    }
    return sum;
  }
};

#endif
